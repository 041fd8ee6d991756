"""The requests of BLAS level 1: vectors with vectors. `cublas1.py` calls cuBLAS, `reference1.py` is NumPy.

Follows https://docs.nvidia.com/cuda/cublas/#cublas-level-1-function-reference. Sums, norms and indices are results with
0 axes, which stay on the device: nothing waits for them. Vectors of f16 and bf16, if an op supports them, are computed
in f32 and rounded once at the end.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from dispatch.core.operands import Output, dense
from dispatch.keys import C64, C128, F32, F64, I32, Dtype
from dispatch.ops.blas.base import BlasRequest, ScaledRequest, Shape, length

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["AsumRequest", "AxpyRequest", "DotRequest", "DotcRequest", "DotuRequest", "IamaxRequest", "IaminRequest"]
__all__ += ["CopyRequest", "Nrm2Request", "ScalRequest", "SwapRequest"]

REAL = {C64: F32, C128: F64}


# -- vectors ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class AxpyRequest(ScaledRequest):
    """alpha · x + y.

    Attributes:
        x, y: vectors of one length; y may be `out` itself.
        out: the result, of their length.
    """

    op: ClassVar[str] = "axpy"
    reads: ClassVar[tuple[str, ...]] = ("x", "y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "y")})
    x: Tensor
    y: Tensor
    _: KW_ONLY
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        n = length("x", self.x)
        return {"x": (n,), "y": (n,), "out": (n,)}

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)}


@dataclass(frozen=True, eq=False)
class ScalRequest(ScaledRequest):
    """alpha · x.

    Attributes:
        x: a vector; it may be `out` itself.
        out: the result, of its length.
    """

    op: ClassVar[str] = "scal"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "x")})
    x: Tensor
    _: KW_ONLY
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        return {"x": (length("x", self.x),), "out": self.x.shape}

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)}


@dataclass(frozen=True, eq=False)
class CopyRequest(BlasRequest):
    """x, copied.

    Attributes:
        x: a vector.
        out: the copy, of its length; by default it is dense.
    """

    op: ClassVar[str] = "copy"
    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: Tensor
    _: KW_ONLY
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        return {"x": (length("x", self.x),), "out": self.x.shape}

    def outputs(self) -> dict[str, Output]:
        return {"out": dense(self.x.shape, self.x.dtype)}


@dataclass(frozen=True, eq=False)
class PairRequest(BlasRequest):
    """Two vectors computed from two others.

    Attributes:
        x, y: vectors of one length.
        out_x: the result for x, which may be x itself.
        out_y: the result for y, which may be y itself.
    """

    reads: ClassVar[tuple[str, ...]] = ("x", "y")
    writes: ClassVar[tuple[str, ...]] = ("out_x", "out_y")
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out_x", "x"), ("out_y", "y")})
    x: Tensor
    y: Tensor
    _: KW_ONLY
    out_x: Tensor | None = None
    out_y: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        n = length("x", self.x)
        return {"x": (n,), "y": (n,)}

    def outputs(self) -> dict[str, Output]:
        result = dense(self.x.shape, self.x.dtype)
        return {"out_x": result, "out_y": result}


@dataclass(frozen=True, eq=False)
class SwapRequest(PairRequest):
    """y and x, exchanged: `swap(x, y, out_x=x, out_y=y)` does it in place."""

    op: ClassVar[str] = "swap"


# -- numbers that stay on the device ---------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class ScalarRequest(BlasRequest):
    """A number computed from a vector.

    Attributes:
        x: a vector.
        out: the number, with 0 axes, on the device of x.
    """

    reads: ClassVar[tuple[str, ...]] = ("x",)
    x: Tensor
    _: KW_ONLY
    out: Tensor | None = None

    def extents(self) -> dict[str, Shape]:
        return {"x": (length("x", self.x),), "out": ()}

    def outputs(self) -> dict[str, Output]:
        return {"out": dense((), self.result_dtype)}

    @property
    def result_dtype(self) -> Dtype:
        """The dtype of the number: real for the magnitudes of complex vectors."""
        return REAL.get(self.x.dtype, self.x.dtype)


@dataclass(frozen=True, eq=False)
class AsumRequest(ScalarRequest):
    """Σ |x_i|; for complex elements Σ |Re x_i| + |Im x_i|."""

    op: ClassVar[str] = "asum"


@dataclass(frozen=True, eq=False)
class Nrm2Request(ScalarRequest):
    """√ Σ |x_i|², without intermediate overflow."""

    op: ClassVar[str] = "nrm2"


@dataclass(frozen=True, eq=False)
class IamaxRequest(ScalarRequest):
    """The first index with the largest |x_i|, counted from 1 as in Fortran; 0 if empty. Complex: |Re x_i| + |Im x_i|.

    This is cuBLAS's number: `dp.iamax(x).item() - 1` is the Python index.
    """

    op: ClassVar[str] = "iamax"

    @property
    def result_dtype(self) -> Dtype:
        return I32


@dataclass(frozen=True, eq=False)
class IaminRequest(IamaxRequest):
    """The first index with the smallest |x_i|, counted from 1 as in Fortran; 0 if empty. Complex: |Re x_i| + |Im x_i|.

    This is cuBLAS's number: `dp.iamin(x).item() - 1` is the Python index.
    """

    op: ClassVar[str] = "iamin"


@dataclass(frozen=True, eq=False)
class DotRequest(ScalarRequest):
    """Σ x_i · y_i; only real vectors.

    Attributes:
        y: of x's length.
    """

    op: ClassVar[str] = "dot"
    reads: ClassVar[tuple[str, ...]] = ("x", "y")
    y: Tensor

    def extents(self) -> dict[str, Shape]:
        n = length("x", self.x)
        return {"x": (n,), "y": (n,), "out": ()}

    @property
    def result_dtype(self) -> Dtype:
        return self.x.dtype


@dataclass(frozen=True, eq=False)
class DotuRequest(DotRequest):
    """Σ x_i · y_i; only complex vectors."""

    op: ClassVar[str] = "dotu"


@dataclass(frozen=True, eq=False)
class DotcRequest(DotRequest):
    """Σ conj(x_i) · y_i; only complex vectors."""

    op: ClassVar[str] = "dotc"
