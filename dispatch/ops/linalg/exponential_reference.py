"""The exponential of a matrix on the host, by the same method as on a GPU: one matrix at a time, results by name.

`scipy.linalg.expm` uses other approximants. With SciPy 1.17.1 its error is up to 200 n·eps·‖A‖·‖exp(A)‖ for symmetric
matrices of 5 rows and norms of 4 to 5, and that of this method is 3. Therefore results are compared with neither, but
with a series.
"""

from __future__ import annotations

from math import ceil, factorial, log2
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import F32, F64
from dispatch.libraries.cusolver.exponential import NOT_FINITE, SINGULAR, TOO_LARGE
from dispatch.ops.linalg.base import real_of
from dispatch.ops.linalg.exponential import THETA, largest_norm
from dispatch.ops.linalg.spectral_reference import lapack

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.linalg.exponential import ExpmRequest

__all__ = ["expm"]


def expm(request: ExpmRequest, a: Array) -> dict[str, Any]:
    """The exponential and the status; the norm is rounded as on a GPU."""
    if not a.size:
        return {"out": a, "info": 0}
    with np.errstate(over="ignore"):
        sums = np.abs(a.astype(np.result_type(a.dtype, np.float64))).sum(axis=0)
        norm = float(sums.max().astype(real_of(request.a.dtype).numpy))
    if not np.isfinite(norm):
        return {"out": a, "info": NOT_FINITE}
    if norm > largest_norm(request):
        return {"out": a, "info": TOO_LARGE}
    theta = THETA[F32 if a.real.dtype == np.float32 else F64]
    squarings = max(0, ceil(log2(norm / theta))) if norm else 0
    lu, p = pade_denominator_and_numerator(a * a.real.dtype.type(2.0**-squarings))
    lu, pivots, status = lapack("getrf", a.dtype)(lu)
    if status:
        return {"out": a, "info": SINGULAR + status}
    x = lapack("getrs", a.dtype)(lu, pivots, p)[0]
    for _ in range(squarings):
        x = x @ x
    return {"out": x, "info": 0}


def pade_denominator_and_numerator(a: Array) -> tuple[Array, Array]:
    """Padé's denominator and numerator, of degree 13 in double precision and of degree 7 in single precision."""
    real = a.real.dtype
    degree = 7 if real == np.float32 else 13
    b = [real.type(factorial(2 * degree - j) // (factorial(degree - j) * factorial(j))) for j in range(degree + 1)]
    one = np.eye(len(a), dtype=real)
    second = a @ a
    fourth = second @ second
    sixth = fourth @ second
    odd = b[7] * sixth + b[5] * fourth + b[3] * second + b[1] * one
    even = b[6] * sixth + b[4] * fourth + b[2] * second + b[0] * one
    if len(b) > 8:
        odd += sixth @ (b[13] * sixth + b[11] * fourth + b[9] * second)
        even += sixth @ (b[12] * sixth + b[10] * fourth + b[8] * second)
    u = a @ odd
    return even - u, even + u
