"""How far the result of a transform may be off, and the numbers that cases transform."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import BF16, C64, F16, F32
from dispatch.ops.fft.request import WHOLE, DftKind, DftNorm
from dispatch.testing.check import Check
from dispatch.testing.memory import Mismatch
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.host_plan import Formula, Results
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.testing.memory import GuardedBuffer
    from dispatch.testing.mutations import Mutation

__all__ = ["SpectrumCheck", "another_norm", "drawn", "of_kind", "spectrum_check"]

EPS = {C64: 2.0**-23, F32: 2.0**-23, F16: 2.0**-13}  # of f16 an eighth: roundoff grows as the root of log2(n)
ROUNDED = {BF16: 2.0**-8}  # what is only rounded to a dtype is off, whatever the size
FACTOR = 4.0  # times eps·log2(2n): what transforms of some thousand sizes on an H100 keep to, primes included


@dataclass(frozen=True)
class SpectrumCheck(Check):
    """A check whose results are held to the norm of all points that one transform makes.

    What transforms are off is of the size of the largest points wherever they are: relative to the norm it is a small
    multiple of eps·log2(n), which is what is allowed.

    Attributes:
        axes: those that are transformed.
        limit: how far a result may be off, relative to the norm of each transform.
        dropped: the squared norms of what transforms to real numbers drop, to which roundoff is relative, too.
    """

    axes: tuple[int, ...] = ()
    limit: float = 0.0
    dropped: Any = 0.0

    def _compare(self, name: str, got: Array) -> None:
        expected = self.expected[name]
        with np.errstate(all="ignore"):
            off, size = (_norms(values, self.axes) for values in (got.astype(expected.dtype) - expected, expected))
        limit = self.limit * np.sqrt(size**2 + self.dropped)
        if not (off <= limit).all():  # NaN is wrong
            worst = np.argmax(np.where(off <= limit, -1, np.nan_to_num(off, nan=np.inf)))
            raise Mismatch(
                f"{self.name}: {name} is wrong in {(~(off <= limit)).sum()} of {off.size} transforms; one is"
                f" {off.ravel()[worst]:.3g} off, expected within {limit.ravel()[worst]:.3g} ({self.request.describe()})"
            )


def spectrum_check(
    name: str,
    request: Any,
    expected: Results,
    written: tuple[GuardedBuffer, ...],
    axes: tuple[int, ...],
    points: float,
    dropped: Array | None = None,
) -> SpectrumCheck:
    """The check of a request whose transforms have so many points.

    `dropped` is what a transform to real numbers drops of a spectrum of one or two points, of the shape of the result:
    the imaginary part may be much larger than the real one that is kept, and a product is rounded as a whole.
    """
    eps = EPS.get(request.outputs()["out"].dtype, 2.0**-52)
    limit = ROUNDED.get(request.outputs()["out"].dtype, FACTOR * eps * float(np.log2(2 * points)))
    beside = 0.0 if dropped is None else _norms(dropped, axes) ** 2
    size = np.broadcast_to(np.sqrt(_norms(expected["out"], axes) ** 2 + beside) * limit, expected["out"].shape)
    return SpectrumCheck(name, request, expected, {"out": size}, written, axes=axes, limit=limit, dropped=beside)


def _norms(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(np.sqrt((np.abs(values) ** 2).sum(axis=axes, keepdims=True)))


def drawn(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Numbers of both signs where there are such."""
    if dtype in WHOLE:
        low, high = (0, 2) if dtype.numpy.kind == "b" else (0, 100) if dtype.numpy.kind == "u" else (-100, 100)
        return np.asarray(rng.integers(low, high, shape).astype(dtype.numpy))
    made = rng.standard_normal(shape)
    return np.asarray((made + 1j * rng.standard_normal(shape) if dtype.is_complex else made).astype(dtype.numpy))


def of_kind(form: Any, kind: DftKind) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of a form's operand and its numbers of points: for C2R half a spectrum, of as many as it would have."""
    shape, points = list(form.shape), form.points
    if kind is DftKind.C2R:
        axes = form.axes or tuple(range(len(shape)))
        points = tuple(shape[axis] for axis in axes) if points is None else points  # odd ones are to be said
        shape[axes[-1]] = shape[axes[-1]] // 2 + 1
    return tuple(shape), points


def another_norm(evaluate: Formula) -> Mutation:
    """The wrong result of another factor, where there is one."""

    def mutation(request: Any) -> Results | None:
        if int(np.prod(request.points)) == 1 or not request.a.size:
            return None
        norm = DftNorm.FORWARD if request.norm == DftNorm.BACKWARD else DftNorm.BACKWARD
        return altered(evaluate, request, norm=norm)

    return mutation
