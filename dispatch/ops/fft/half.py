"""HalfDftRequest: Fourier transforms of numbers of 16 bits a part, whose complex ones are pairs; and by NumPy.

Making one validates it; this file calls no library. NumPy computes in single precision and rounds once.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.core.host_plan import NumpyPlan
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.keys import BF16, F16
from dispatch.ops.fft.reference import transformed
from dispatch.ops.fft.request import DftKind, DftNorm, TransformRequest

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["PAIR", "HalfDftRequest", "evaluate", "exact", "half_dft", "numpy_half_dft", "side_by_side"]

PAIR = 2  # numbers of a complex one
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HalfDftRequest(TransformRequest["Tensor"]):
    """`dft` of numbers of 16 bits: a complex one is a pair, its real and its imaginary part, along a last axis of two.

    That is how `torch.view_as_real` shows complex numbers of 2 x 16 bits; NumPy has no dtype for them, and this library
    none. Axes are those of the numbers: -1 is the one before the pairs.

    Attributes:
        a: f16 or bf16, of any shape; of C2C and of C2R its last axis has the two parts of each number. These lie side
            by side in memory, each pair at a multiple of 4 bytes, as `a.copy()` has them. Of C2R half a spectrum, as of
            `dft`.
        out: of a's dtype; of C2C and R2C with a last axis of two, in memory as that of `a`. C2C may be into `a` itself.

    cuFFT's own transforms in f16 are of numbers of points that are powers of 2, and round between their steps; they
    carry out what has no factor 1/n. All else is computed in f32 and rounded once. Numbers beyond 65504 are infinite in
    f16: of n points of size 1 a sum may be n.
    """

    op: ClassVar[str] = "half_dft"
    reads: ClassVar[tuple[str, ...]] = ("a",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    kind: DftKind | str = DftKind.C2C
    s: int | tuple[int, ...] | None = None
    axes: int | tuple[int, ...] | None = None
    _: KW_ONLY
    inverse: bool = False
    norm: DftNorm | str = DftNorm.BACKWARD
    out: Tensor | None = None

    @property
    def extents(self) -> Shape:
        """How many numbers `a` has along each axis."""
        return self.a.shape if self.kind == DftKind.R2C else self.a.shape[:-1]

    def check_fields(self) -> None:
        given = str(self.a.layout)
        if self.a.dtype not in (F16, BF16):
            raise BadRequest("a", given, "f16 or bf16", "dft takes numbers of other dtypes")
        if self.kind != DftKind.R2C and self.a.shape[-1:] != (PAIR,):
            hint = 'kind="r2c" takes real numbers; torch.view_as_real(x) shows complex ones so'
            raise BadRequest("a", given, "a last axis of two, the real and the imaginary parts", hint)
        self.check_axes()

    def outputs(self) -> dict[str, Output]:
        made = self.made if self.kind == DftKind.C2R else (*self.made, PAIR)
        return {"out": dense(made, self.a.dtype)}

    def attributes(self) -> tuple[Any, ...]:
        return self.kind, self.points, self.transformed, self.inverse, self.norm


half_dft = request_function(HalfDftRequest, "half_dft")


# -- NumPy ------------------------------------------------------------------------------------------------------------
def evaluate(request: HalfDftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in a working dtype."""
    a: Array = np.asarray(request.a).astype(work)
    if request.kind != DftKind.R2C:
        a = a[..., 0] + a.dtype.type(1) * 1j * a[..., 1]
    made = transformed(a, request, work)
    return {"out": made if request.kind == DftKind.C2R else np.stack((made.real, made.imag), -1)}


def exact(request: HalfDftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in double precision."""
    del work
    return evaluate(request, np.dtype(np.float64))


def numpy_half_dft(request: HalfDftRequest, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy in single precision."""
    del request, executor
    return NumpyPlan(row, evaluate, np.dtype(np.float32))


# -- the rule of the rows ---------------------------------------------------------------------------------------------
def side_by_side(request: OperandRequest[Any]) -> str:
    """The two parts of a number are one word of 32 bits."""
    kind: Any = getattr(request, "kind", None)
    for name, real in (("a", DftKind.R2C), ("out", DftKind.C2R)):
        layout = request.layout_of(name)
        if kind == real or not layout.size:
            continue
        outer = [step for extent, step in zip(layout.shape, layout.strides, strict=True) if extent > 1][:-1]
        if layout.strides[-1] != 1 or any(step % PAIR for step in outer) or layout.alignment < PAIR * 2:
            return f"needs real and imaginary parts of {name} side by side at a multiple of 4 bytes, has {layout}"
    return ""
