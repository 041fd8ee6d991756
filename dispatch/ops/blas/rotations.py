"""The requests of BLAS level 1 that rotate vectors, and those that compute the rotation.

Follows https://docs.nvidia.com/cuda/cublas/#cublas-level-1-function-reference. The numbers of a rotation are tensors on
the device: `rot` and `rotm` read the results of `rotg` and `rotmg`, and nothing waits.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.ops.blas.base import BlasRequest, Shape
from dispatch.ops.blas.level1 import REAL, PairRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["RotRequest", "RotgRequest", "RotmRequest", "RotmgRequest"]


@dataclass(frozen=True, eq=False)
class RotRequest(PairRequest):
    """c · x + s · y and c · y - conj(s) · x: a plane rotation of two vectors.

    Attributes:
        c: the cosine, a number with 0 axes on the device: real, of x's precision. `dev.array(0.6)` is one of f64.
        s: the sine, a number of x's dtype with 0 axes; for complex vectors it may also be real.

    For f16 and bf16 the numbers have the vectors' dtype.
    """

    op: ClassVar[str] = "rot"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "c", "s")
    mixed: ClassVar[tuple[str, ...]] = ("c", "s")
    c: Tensor
    s: Tensor

    def extents(self) -> dict[str, Shape]:
        return super().extents() | {"c": (), "s": ()}

    def dtype_of(self, name: str) -> Dtype:
        real = REAL.get(self.x.dtype, self.x.dtype)
        if name == "c" or (name == "s" and self.s.dtype is real):
            return real
        return self.x.dtype


@dataclass(frozen=True, eq=False)
class RotgRequest(BlasRequest):
    """The c, s, r and z of the rotation that zeroes b: c · a + s · b = r and c · b - conj(s) · a = 0.

    Attributes:
        a, b: numbers with 0 axes, of one dtype.
        c: the cosine, real.
        s: the sine.
        r: the new a: the norm of (a, b). If a is 0 its phase is the library's choice.
        z: a number that encodes c and s: s if |a| > |b|, otherwise 1 / c, or 1 if c is 0. BLAS does not define it for
            complex numbers; it is then b.
    """

    op: ClassVar[str] = "rotg"
    reads: ClassVar[tuple[str, ...]] = ("a", "b")
    writes: ClassVar[tuple[str, ...]] = ("c", "s", "r", "z")
    a: Tensor
    b: Tensor
    _: KW_ONLY
    c: Tensor | None = None
    s: Tensor | None = None
    r: Tensor | None = None
    z: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        return {"a": (), "b": ()}

    def outputs(self) -> dict[str, Output]:
        number = dense((), self.a.dtype)
        real = dense((), REAL.get(self.a.dtype, self.a.dtype))
        return {"c": real, "s": number, "r": number, "z": number}


@dataclass(frozen=True, eq=False)
class RotmRequest(PairRequest):
    """h11 · x + h12 · y and h21 · x + h22 · y: a modified rotation of two vectors; only real ones.

    Attributes:
        param: (5,), dense, on the device: a flag, h11, h21, h12, h22. With a flag of -1 all are read, with 0 h11 and
            h22 are 1, with 1 h12 is 1 and h21 -1, and with -2 the vectors are unchanged. Other flags are undefined.
    """

    op: ClassVar[str] = "rotm"
    reads: ClassVar[tuple[str, ...]] = ("x", "y", "param")
    param: Tensor

    def extents(self) -> dict[str, Shape]:
        return super().extents() | {"param": (5,)}

    def check_fields(self) -> None:
        super().check_fields()
        if not self.param.layout.is_contiguous:
            raise BadRequest("param", str(self.param.layout), "a dense tensor", "copy it")


@dataclass(frozen=True, eq=False)
class RotmgRequest(BlasRequest):
    """The modified rotation that zeroes the second element of (√d1 · x1, √d2 · y1), and the new d1, d2 and x1.

    Attributes:
        d1, d2, x1, y1: numbers with 0 axes, of one dtype, real.
        param: (5,), dense: a flag, h11, h21, h12, h22, as `rotm` reads them. The elements that the flag implies are not
            read, and may be 0 or the implied value.
        out_d1, out_d2, out_x1: the new values; each may be the operand itself.
    """

    op: ClassVar[str] = "rotmg"
    reads: ClassVar[tuple[str, ...]] = ("d1", "d2", "x1", "y1")
    writes: ClassVar[tuple[str, ...]] = ("param", "out_d1", "out_d2", "out_x1")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out_d1", "d1"), ("out_d2", "d2"), ("out_x1", "x1")})
    d1: Tensor
    d2: Tensor
    x1: Tensor
    y1: Tensor
    _: KW_ONLY
    param: Tensor | None = None
    out_d1: Tensor | None = None
    out_d2: Tensor | None = None
    out_x1: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        return dict.fromkeys(self.reads, ())

    def outputs(self) -> dict[str, Output]:
        number = dense((), self.d1.dtype)
        return {"param": dense((5,), self.d1.dtype), "out_d1": number, "out_d2": number, "out_x1": number}

    def check_fields(self) -> None:
        super().check_fields()
        if self.param is not None and not self.param.layout.is_contiguous:
            raise BadRequest("param", str(self.param.layout), "a dense tensor", "leave param=None")
