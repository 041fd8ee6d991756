"""Discrete cosine and sine transforms of types 1 to 4: their requests, and the host's implementation with SciPy."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dispatch.checks import check_int
from dispatch.core.host_plan import NumpyPlan, Results, values, work_of
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest, Refused
from dispatch.keys import BF16, C64, C128, F16, F32, F64
from dispatch.ops.fft.request import WHOLE, DftNorm
from dispatch.refusal import Kind

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["CosineRequest", "DctRequest", "DstRequest", "dct", "dst", "evaluate", "exact", "scipy_cosine"]

RESULTS: dict[Dtype, Dtype] = {
    **{dtype: dtype for dtype in (F32, F64, C64, C128)},
    F16: F32,
    BF16: F32,
    **dict.fromkeys(WHOLE, F64),
}
MAX_POINTS = 2**60
OTHER = {1: 1, 2: 3, 3: 2, 4: 4}  # the type of the inverse, apart from a factor
NEEDS_SCIPY = "needs SciPy on the host, which is not installed: pip install 'cudabind[host]'"


class CosineRequest(OperandRequest["Tensor"]):
    """The common fields of cosine and sine transforms.

    Attributes:
        x: any shape and any strides; f32, f64, f16, bf16, whole numbers, or c64 and c128, whose real and imaginary
            parts are transformed separately.
        type: 1, 2, 3 or 4, as in the formulas.
        n: the number of points along the axis: `x` is padded with zeros or cut off to it.
        axis: the axis that is transformed.
        inverse: the inverse of that type, which is the type 1, 3, 2 or 4 with another factor.
        norm: the factor; N is the period of the type in points: 2n, for type 1 2(n - 1), and 2(n + 1) for sines of type
            1. "backward" is 1/N if `inverse`, "forward" 1/N if not `inverse`, "ortho" 1/√N in both directions.
        orthogonalize: whether the ends are scaled so that the transform is an orthogonal matrix with "ortho"; None
            means only with "ortho".
        out: of x's shape with n points along the axis: f32 for f32, f16 and bf16, f64 for f64 and whole numbers,
            complex for complex numbers.

    Follows https://docs.scipy.org/doc/scipy/reference/generated/scipy.fft.dct.html, and `scipy.fft.dst`. `x` is never
    overwritten.
    """

    reads: ClassVar[tuple[str, ...]] = ("x",)
    sine: ClassVar[bool]
    x: Tensor
    type: int
    n: int | None
    axis: int
    inverse: bool
    norm: DftNorm | str
    orthogonalize: bool | None

    def check_fields(self) -> None:
        rank = self.x.ndim
        if self.x.dtype not in RESULTS:
            hint = "convert it: x.astype('f32')"
            raise BadRequest("x", str(self.x.layout), "f32, f64, c64, c128, f16, bf16 or whole numbers", hint)
        check_int("type", self.type, 1, 4)
        if rank == 0:
            raise BadRequest("x", str(self.x.layout), "one axis or more", "x[None] adds an axis")
        check_int("axis", self.axis, -rank, rank - 1)
        least = 2 if self.type == 1 and not self.sine else 1
        if self.n is not None:
            check_int("n", self.n, least, MAX_POINTS)
        elif self.points < least:
            what = f"{self.points} elements along axis {self.axis} of x"
            raise BadRequest("x", what, f"{least} or more, for {self.op} of type {self.type}, or an n")

    @property
    def points(self) -> int:
        """The number of points of a line."""
        return self.x.shape[self.axis] if self.n is None else self.n

    @property
    def summed(self) -> int:
        """The type of the sums: an inverse computes the sums of the inverse type."""
        return OTHER[self.type] if self.inverse else self.type

    @property
    def is_orthogonal(self) -> bool:
        """Whether the ends are scaled."""
        return self.norm == DftNorm.ORTHO if self.orthogonalize is None else self.orthogonalize

    @property
    def factor(self) -> float:
        """The factor of the sums."""
        end_points = 0 if self.type != 1 else 1 if self.sine else -1
        period = 2 * (self.points + end_points)
        if self.norm == DftNorm.ORTHO:
            return 1 / math.sqrt(period)
        return 1 / period if (self.norm == DftNorm.BACKWARD) == self.inverse else 1.0

    def outputs(self) -> dict[str, Output]:
        extents = list(self.x.shape)
        extents[self.axis] = self.points
        return {"out": dense(tuple(extents), RESULTS[self.x.dtype])}

    def attributes(self) -> tuple[Any, ...]:
        return self.type, self.points, self.axis % self.x.ndim, self.inverse, self.norm, self.is_orthogonal


@dataclass(frozen=True, eq=False)
class DctRequest(CosineRequest):
    """The discrete cosine transform of each line along an axis.

    The sums, before their factor: type 1 x[0] + (-1)ᵏ·x[n-1] + 2·Σ x[i]·cos(πki/(n-1)) over those in between, 2
    2·Σ x[i]·cos(πk(2i+1)/2n), 3 x[0] + 2·Σ x[i]·cos(π(2k+1)i/2n) from i = 1 on, 4 2·Σ x[i]·cos(π(2k+1)(2i+1)/4n).
    """

    op: ClassVar[str] = "dct"
    sine: ClassVar[bool] = False
    x: Tensor
    type: int = 2
    n: int | None = None
    axis: int = -1
    _: KW_ONLY
    inverse: bool = False
    norm: DftNorm | str = DftNorm.BACKWARD
    orthogonalize: bool | None = None
    out: Tensor | None = None


@dataclass(frozen=True, eq=False)
class DstRequest(CosineRequest):
    """The discrete sine transform of each line along an axis.

    The sums, before their factor: type 1 2·Σ x[i]·sin(π(k+1)(i+1)/(n+1)), 2 2·Σ x[i]·sin(π(k+1)(2i+1)/2n), 3
    (-1)ᵏ·x[n-1] + 2·Σ x[i]·sin(π(2k+1)(i+1)/2n) over those before the last, 4 2·Σ x[i]·sin(π(2k+1)(2i+1)/4n).
    """

    op: ClassVar[str] = "dst"
    sine: ClassVar[bool] = True
    x: Tensor
    type: int = 2
    n: int | None = None
    axis: int = -1
    _: KW_ONLY
    inverse: bool = False
    norm: DftNorm | str = DftNorm.BACKWARD
    orthogonalize: bool | None = None
    out: Tensor | None = None


# -- SciPy ------------------------------------------------------------------------------------------------------------
def evaluate(request: CosineRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in a working dtype."""
    import scipy.fft

    converted = values(request.x, work)
    function = getattr(scipy.fft, f"{'i' if request.inverse else ''}{request.op}")
    norm = DftNorm(request.norm).name.lower()  # type: ignore[arg-type]  # a valid norm: check_fields checked it
    choices = {"norm": norm, "orthogonalize": request.is_orthogonal}
    if not converted.size and not math.prod(request.outputs()["out"].shape):
        return {"out": np.zeros(request.outputs()["out"].shape, converted.dtype)}
    if converted.dtype.kind != "c":
        return {"out": function(converted, request.type, request.points, request.axis, **choices)}
    parts = [
        function(part, request.type, request.points, request.axis, **choices)
        for part in (converted.real, converted.imag)
    ]
    return {"out": parts[0] + 1j * parts[1]}  # for complex numbers SciPy (1.17) ignores `orthogonalize`


def exact(request: CosineRequest, work: np.dtype[Any]) -> Results:
    """The output by name, computed in extended precision and rounded to a dtype."""
    return {"out": values(evaluate(request, np.dtype(np.longdouble))["out"], work)}


def scipy_cosine(request: CosineRequest, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with SciPy; Refused if SciPy is not installed."""
    del request, executor
    try:
        import scipy.fft  # noqa: F401  # looked for now, used by the plan
    except ImportError as error:
        raise Refused(NEEDS_SCIPY, Kind.RULE) from error
    return NumpyPlan(row, evaluate, work_of(row.dtypes[1]))


dct = request_function(DctRequest, "dct")
dst = request_function(DstRequest, "dst")
