"""Error bounds for the results of transforms, and the numbers that cases transform."""

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

EPS = {C64: 2.0**-23, F32: 2.0**-23, F16: 2.0**-13}  # for f16 an eighth: roundoff grows as the root of log2(n)
ROUNDED = {BF16: 2.0**-8}  # a result that is only rounded to a dtype, whatever the size
FACTOR = 4.0  # times eps·log2(2n): the bound that transforms of some thousand sizes on an H100 meet, primes included


@dataclass(frozen=True)
class SpectrumCheck(Check):
    """A check that compares errors with the norm of all points of one transform.

    The errors of a transform are proportional to its largest points, wherever these are: relative to the norm they are
    a small multiple of eps·log2(n), which is the limit.

    Attributes:
        axes: the axes that are transformed.
        limit: the largest error, relative to the norm of each transform.
        dropped: the squared norms of the part that transforms to real numbers drop; roundoff is relative to it, too.
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
    """The check of a request whose transforms have `points` points.

    `dropped` is the part of a spectrum of one or two points that a transform to real numbers drops, in the result's
    shape: the imaginary part may be much larger than the real part of the result, and a product is rounded as a whole.
    """
    eps = EPS.get(request.outputs()["out"].dtype, 2.0**-52)
    limit = ROUNDED.get(request.outputs()["out"].dtype, FACTOR * eps * float(np.log2(2 * points)))
    dropped_norm = 0.0 if dropped is None else _norms(dropped, axes) ** 2
    size = np.broadcast_to(np.sqrt(_norms(expected["out"], axes) ** 2 + dropped_norm) * limit, expected["out"].shape)
    return SpectrumCheck(name, request, expected, {"out": size}, written, axes=axes, limit=limit, dropped=dropped_norm)


def _norms(values: Array, axes: tuple[int, ...]) -> Array:
    return np.asarray(np.sqrt((np.abs(values) ** 2).sum(axis=axes, keepdims=True)))


def drawn(rng: np.random.Generator, dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Random numbers, of both signs if the dtype has them."""
    if dtype in WHOLE:
        low, high = (0, 2) if dtype.numpy.kind == "b" else (0, 100) if dtype.numpy.kind == "u" else (-100, 100)
        return np.asarray(rng.integers(low, high, shape).astype(dtype.numpy))
    values = rng.standard_normal(shape)
    return np.asarray((values + 1j * rng.standard_normal(shape) if dtype.is_complex else values).astype(dtype.numpy))


def of_kind(form: Any, kind: DftKind) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of a form's operand and its numbers of points: for C2R that of half a spectrum of so many points."""
    shape, points = list(form.shape), form.points
    if kind is DftKind.C2R:
        axes = form.axes or tuple(range(len(shape)))
        points = tuple(shape[axis] for axis in axes) if points is None else points  # odd numbers must be passed as `s`
        shape[axes[-1]] = shape[axes[-1]] // 2 + 1
    return tuple(shape), points


def another_norm(evaluate: Formula) -> Mutation:
    """The wrong result of another factor, if there is one."""

    def mutation(request: Any) -> Results | None:
        if int(np.prod(request.points)) == 1 or not request.a.size:
            return None
        norm = DftNorm.FORWARD if request.norm == DftNorm.BACKWARD else DftNorm.BACKWARD
        return altered(evaluate, request, norm=norm)

    return mutation
