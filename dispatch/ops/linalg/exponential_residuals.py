"""The error of an exponential, in units of its roundoff."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.linalg.norms import norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Array

__all__ = ["expm", "series"]

LONG = 40  # up to this many rows the series uses more than double precision, if the machine has it
TERMS = 24  # for numbers up to 1/2 the remainder is below 2^-100


def expm(request: Any, a: Array, given: Any, found: Any, eps: float) -> Iterator[tuple[str, float]]:
    """The error of exp(A) = X^(2^s), where X = exp(A / 2^s), in the spectral norm.

    An error of n·eps in each factor X causes an error of n·eps·2^s times the product of the norms of all matrices that
    are squared, which is at least any ‖X^i‖·‖X^(2^s - i)‖: Higham, Functions of Matrices (2008), section 10.3. 2^s is
    replaced by ‖A‖, because an error of n·eps in A has at least that effect (section 10.2). For normal matrices the
    product is ‖exp(A)‖.
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
    """The largest singular value; NaN if the matrix is not finite."""
    return float(np.linalg.norm(x, 2)) if np.isfinite(x).all() else float("nan")


def series(a: Array) -> Array:
    """The exponential in double precision, by its series and squarings."""
    wide = a if len(a) > LONG else a.astype(np.clongdouble if a.dtype.kind == "c" else np.longdouble)
    count = max(0, int(np.ceil(np.log2(max(2 * norm(a), 1.0)))))
    scaled, one = wide / 2.0**count, np.eye(len(a))
    power = one + scaled / TERMS
    for number in range(TERMS - 1, 0, -1):
        power = one + scaled @ power / number
    for _ in range(count):
        power = power @ power
    return np.asarray(power.astype(a.dtype))
