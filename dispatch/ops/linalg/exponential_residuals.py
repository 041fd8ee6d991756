"""How far an exponential is from right, in units of what roundoff makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.norms import norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Array

__all__ = ["expm", "series"]

LONG = 40  # rows up to which the series is summed in more than double precision, where the machine has that
TERMS = 24  # of numbers up to 1/2: the rest is below 2^-100


def expm(request: Any, a: Array, given: Any, found: Any, eps: float) -> Iterator[tuple[str, float]]:
    """The error of exp(A) = X^(2^s), of X = exp(A / 2^s), in the norm of the largest singular value.

    An error of n·eps in each X of that product makes one of n·eps·2^s times the product of the norms of all that is
    squared, which is no less than any ‖X^i‖·‖X^(2^s - i)‖: Higham, Functions of Matrices (2008), section 10.3. For 2^s
    stands ‖A‖, for that much an error of n·eps in A makes of it at least (section 10.2). Of normal matrices the product
    is ‖exp(A)‖.
    """
    del request, given
    if not a.size:
        return
    count = max(0, int(np.ceil(np.log2(max(norm(a), 1.0)))))
    power = series(a / 2.0**count)
    size = largest(power)
    for _ in range(count):
        size *= largest(power)
        power = power @ power
    unit = len(a) * eps * max(1.0, largest(a)) * size
    yield "the exponential's error", largest(found["out"] - series(a)) / unit


def largest(x: Array) -> float:
    """The largest singular value; NaN of what is not finite."""
    return float(np.linalg.norm(x, 2)) if np.isfinite(x).all() else float("nan")


def series(a: Array) -> Array:
    """The exponential in double precision, by its series and squarings."""
    wide = a if len(a) > LONG else a.astype(np.clongdouble if a.dtype.kind == "c" else np.longdouble)
    count = max(0, int(np.ceil(np.log2(max(2 * norm(a), 1.0)))))
    scaled, one = wide / 2.0**count, np.eye(len(a))
    made = one + scaled / TERMS
    for number in range(TERMS - 1, 0, -1):
        made = one + scaled @ made / number
    for _ in range(count):
        made = made @ made
    return np.asarray(made.astype(a.dtype))
