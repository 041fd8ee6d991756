"""HalfDftRequest: Fourier transforms of numbers of 16 bits, where a complex number is a pair; also with NumPy.

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

PAIR = 2  # parts of a complex number
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HalfDftRequest(TransformRequest["Tensor"]):
    """`dft` of numbers of 16 bits: a complex one is a pair, its real and its imaginary part, along a last axis of two.

    `torch.view_as_real` shows complex numbers of 2 x 16 bits in this form; NumPy and this library have no dtype for
    them. Axes are those of the numbers: -1 is the axis before the pairs.

    Attributes:
        a: f16 or bf16, of any shape; for C2C and C2R its last axis holds the two parts of each number. These are
            adjacent in memory, each pair at a multiple of 4 bytes, as in `a.copy()`. For C2R half a spectrum, as in
            `dft`.
        out: of a's dtype; for C2C and R2C with a last axis of two, with the same memory layout as that of `a`. C2C may
            write to `a` itself.

    cuFFT's f16 transforms are for numbers of points that are powers of 2, and round after each step; they are used
    where there is no factor 1/n. Everything else is computed in f32 and rounded once. Numbers beyond 65504 are infinite
    in f16: a sum over n points of magnitude 1 can reach n.
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
        """The number of numbers that `a` has along each axis."""
        return self.a.shape if self.kind == DftKind.R2C else self.a.shape[:-1]

    def check_fields(self) -> None:
        layout = str(self.a.layout)
        if self.a.dtype not in (F16, BF16):
            raise BadRequest("a", layout, "f16 or bf16", "use dft for other dtypes")
        if self.kind != DftKind.R2C and self.a.shape[-1:] != (PAIR,):
            hint = 'for real numbers pass kind="r2c"; torch.view_as_real(x) is such a view of complex numbers'
            raise BadRequest("a", layout, "a last axis of two, the real and the imaginary parts", hint)
        self.check_axes()

    def outputs(self) -> dict[str, Output]:
        shape = self.result_shape if self.kind == DftKind.C2R else (*self.result_shape, PAIR)
        return {"out": dense(shape, self.a.dtype)}


half_dft = request_function(HalfDftRequest, "half_dft")


# -- NumPy ------------------------------------------------------------------------------------------------------------
def evaluate(request: HalfDftRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in a working dtype."""
    a: Array = np.asarray(request.a).astype(work)
    if request.kind != DftKind.R2C:
        a = a[..., 0] + a.dtype.type(1) * 1j * a[..., 1]
    result = transformed(a, request, work)
    return {"out": result if request.kind == DftKind.C2R else np.stack((result.real, result.imag), -1)}


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
            return f"needs adjacent real and imaginary parts of {name} at multiples of 4 bytes, has {layout}"
    return ""
