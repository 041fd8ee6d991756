"""DftRequest: a discrete Fourier transform and its axes. Making one validates it; this file calls no library."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cudabind._cached import cached_property
from dispatch.checks import check_int
from dispatch.core.operands import OperandRequest, Output, dense
from dispatch.core.request import R_co
from dispatch.errors import BadRequest
from dispatch.keys import BF16, BOOL, C64, C128, F16, F32, F64, I8, I32, I64, U8, U32, U64, Choice, Dtype, member

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["COMPUTED", "WHOLE", "DftKind", "DftNorm", "DftRequest", "TransformRequest", "result_dtype"]

Shape = tuple[int, ...]
WHOLE = (I8, U8, I32, U32, I64, U64, BOOL)
SPECTRA = {F32: C64, F64: C128, F16: C64, BF16: C64, C64: C64, C128: C128, **dict.fromkeys(WHOLE, C128)}
REALS = {C64: F32, C128: F64, F32: F32, F64: F64, **dict.fromkeys(WHOLE, F64)}
COMPUTED = {C64: (F32, C64), C128: (F64, C128), F32: (F32, C64), F64: (F64, C128)}  # by the result's dtype
MAX_POINTS = 2**62  # along an axis


class DftKind(Choice):
    """The numbers of a transform: C2C complex to complex, R2C real to half a spectrum, C2R half a spectrum to real.

    Half a spectrum has n // 2 + 1 of the n points along the last axis: the others are the conjugates of these.
    """

    C2C = 0
    R2C = 1
    C2R = 2


class DftNorm(Choice):
    """The direction that is divided by the number of points n: BACKWARD, FORWARD, or ORTHO: both, by √n."""

    BACKWARD = 0
    ORTHO = 1
    FORWARD = 2


class TransformRequest(OperandRequest[R_co]):
    """The common fields of requests for transforms: the transformed axes of `a`, and the number of points along each.

    Attributes:
        kind: the numbers of the transform: "c2c", "r2c" or "c2r".
        s: the number of points along each of the axes: `a` is padded with zeros or cut off to it. None takes the
            extents of `a`, for C2R 2·(m - 1) along the last axis, where its extent is m.
        axes: the axes that are transformed, each once; None for the last ones that `s` has numbers for, or for all.
        inverse: the sign of the exponent.
        norm: the factor f; "backward" is 1/n if `inverse`, "forward" 1/n if not `inverse`, "ortho" 1/√n in both
            directions.
    """

    a: Tensor
    kind: DftKind | str
    s: int | tuple[int, ...] | None
    axes: int | tuple[int, ...] | None
    inverse: bool
    norm: DftNorm | str

    @property
    def extents(self) -> Shape:
        """The number of numbers that `a` has along each axis."""
        return self.a.shape

    def check_axes(self) -> None:
        """BadRequest for axes and numbers of points that `a` cannot have."""
        rank = len(self.extents)
        count = len(_tuple(self.axes))
        if self.s is not None and self.axes is not None and len(_tuple(self.s)) != count:
            raise BadRequest("s", repr(self.s), f"a number for each of the {count} axes {self.axes}")
        if self.s is not None and self.axes is None and len(_tuple(self.s)) > rank:
            raise BadRequest("s", repr(self.s), f"at most {rank} numbers: a is {self.a.layout}")
        for axis in _tuple(self.axes):
            if rank == 0:
                raise BadRequest("axes", repr(self.axes), "none, because a has no axes", "a[None] adds an axis")
            check_int("axes", axis, -rank, rank - 1)
        if len(set(self.transformed)) < len(self.transformed):
            raise BadRequest("axes", repr(self.axes), "each axis once")
        if self.kind != DftKind.C2C and not self.transformed:
            wanted = f"at least one axis, because {member(self.kind).name} halves the last"
            raise BadRequest("axes", repr(self.axes), wanted)
        self._check_points()

    def _check_points(self) -> None:
        if self.s is not None:
            for n in _tuple(self.s):
                if type(n) is not int or n != -1:  # NumPy's notation for all points
                    check_int("s", n, 1, MAX_POINTS)
        for axis, n in zip(self.transformed, self.points, strict=True):
            if n < 1:
                what = f"{self.extents[axis]} elements along axis {axis} of a"
                wanted = "two or more, for C2R" if self.kind == DftKind.C2R and self.extents[axis] else "one or more"
                raise BadRequest("a", what, f"{wanted}, or s with the number of points")

    @cached_property
    def transformed(self) -> Shape:
        """The axes that are transformed, as numbers from 0 on, in the order of the argument."""
        rank = len(self.extents)
        if self.axes is None:
            return tuple(range(rank))[rank - (rank if self.s is None else len(_tuple(self.s))) :]
        return tuple(axis % rank for axis in _tuple(self.axes))

    @cached_property
    def points(self) -> Shape:
        """The number of points along each of them."""
        shape = self.extents
        numbers = (-1,) * len(self.transformed) if self.s is None else _tuple(self.s)
        n = [shape[axis] if one == -1 else one for axis, one in zip(self.transformed, numbers, strict=False)]
        if self.kind == DftKind.C2R and self.s is None:
            n[-1] = 2 * (shape[self.transformed[-1]] - 1)
        return tuple(n)

    @cached_property
    def read(self) -> Shape:
        """The extents of the transform's input: `a` cut off or padded with zeros."""
        return self._of_points(halved=self.kind == DftKind.C2R)

    @property
    def factor(self) -> float:
        """The factor of the sums."""
        n = math.prod(self.points)
        if self.norm == DftNorm.ORTHO:
            return 1 / math.sqrt(n)
        return 1 / n if (self.norm == DftNorm.BACKWARD) == self.inverse else 1.0

    @property
    def result_shape(self) -> Shape:
        """The number of numbers of the result along each axis."""
        return self._of_points(halved=self.kind == DftKind.R2C)

    def _of_points(self, *, halved: bool) -> Shape:
        """The extents of `a` with the numbers of points along the axes; `halved`: the last as in half a spectrum."""
        extents = list(self.extents)
        for axis, n in zip(self.transformed, self.points, strict=True):
            extents[axis] = n
        if halved:
            extents[self.transformed[-1]] = self.points[-1] // 2 + 1
        return tuple(extents)

    def attributes(self) -> tuple[Any, ...]:
        return self.kind, self.points, self.transformed, self.inverse, self.norm


@dataclass(frozen=True, eq=False)
class DftRequest(TransformRequest["Tensor"]):
    """out[k] = f · Σ a[t] · exp(∓2πi (k₀t₀/n₀ + k₁t₁/n₁ + …)): a discrete Fourier transform over some axes.

    The sign is minus, or plus if `inverse`. `dispatch.fft` has the same with NumPy's signatures.

    Attributes:
        a: any shape and any strides; c64, c128, f32, f64, f16, bf16 or whole numbers. For C2R half a spectrum: the
            imaginary parts that no spectrum of real numbers has are not read, as in NumPy.
        factors: multiplied with each element of `a` before the transform: a window, or another spectrum. Of a shape
            that broadcasts to a's; real or, except for R2C, complex, of the precision of the computation.
        out: of a's shape with s along the axes, for R2C s // 2 + 1 along the last one. C2C may write to `a` itself. c64
            for c64, f32, f16 and bf16, c128 for c128, f64 and whole numbers; for C2R f32 for c64 and f32, f64 for the
            rest.

    Follows https://numpy.org/doc/stable/reference/routines.fft.html#implementation-details. `a` is never overwritten,
    unless it is `out`. Zeros are transformed like other numbers: a NaN affects all results that depend on it.
    """

    op: ClassVar[str] = "dft"
    reads: ClassVar[tuple[str, ...]] = ("a", "factors")
    mixed: ClassVar[tuple[str, ...]] = ("factors",)
    in_place: ClassVar[frozenset[tuple[str, str]]] = frozenset({("out", "a")})
    a: Tensor
    kind: DftKind | str = DftKind.C2C
    s: int | tuple[int, ...] | None = None
    axes: int | tuple[int, ...] | None = None
    _: KW_ONLY
    inverse: bool = False
    norm: DftNorm | str = DftNorm.BACKWARD
    factors: Tensor | None = None
    out: Tensor | None = None

    def check_fields(self) -> None:
        self._check_dtype_of_a()
        self.check_axes()
        self._check_factors()

    def _check_factors(self) -> None:
        factors = self.factors
        if factors is None:
            return
        real, spectrum = COMPUTED[result_dtype(self.a.dtype, self.kind)]  # type: ignore[index]  # check_fields checked it
        wanted = (real,) if self.kind == DftKind.R2C else (real, spectrum)
        if factors.dtype not in wanted:
            words = " or ".join(map(str, wanted))
            raise BadRequest("factors", str(factors.layout), f"{words}, in which {member(self.kind).name} is computed")
        ends = zip(reversed(factors.shape), reversed(self.a.shape), strict=False)
        if factors.ndim > self.a.ndim or any(one not in (1, other) for one, other in ends):
            raise BadRequest(
                "factors", str(factors.layout), f"a shape that broadcasts to that of a, {list(self.a.shape)}"
            )

    def _check_dtype_of_a(self) -> None:
        dtype, kind = self.a.dtype, self.kind
        layout = str(self.a.layout)
        if kind == DftKind.R2C and dtype.is_complex:
            hint = 'for complex numbers use kind="c2c" (dispatch.fft.fft)'
            raise BadRequest("a", layout, "real numbers, for R2C", hint)
        if result_dtype(dtype, kind) is None:
            wanted = "c64, c128, f32, f64 or whole numbers, for C2R" if kind == DftKind.C2R else NUMBERS
            raise BadRequest("a", layout, wanted, "convert it: a.astype('f32')")

    def outputs(self) -> dict[str, Output]:
        dtype = result_dtype(self.a.dtype, self.kind)
        return {"out": dense(self.result_shape, dtype)}  # type: ignore[arg-type]  # check_fields checked it


NUMBERS = "c64, c128, f32, f64, f16, bf16 or whole numbers"


def result_dtype(dtype: Dtype, kind: DftKind | str) -> Dtype | None:
    """The dtype of the result for an operand's dtype; None if it is not supported."""
    return (REALS if kind == DftKind.C2R else SPECTRA).get(dtype)


def _tuple(given: int | tuple[int, ...] | None) -> Shape:
    if given is None:
        return ()
    return given if isinstance(given, tuple) else (given,)
