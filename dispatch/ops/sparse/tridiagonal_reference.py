"""Systems with three diagonals by LAPACK: the host's results, and the expected ones in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.errors import BadRequest
from dispatch.ops.sparse.matrix_reference import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["TRIDIAGONAL", "dense_of_three"]


def check_ends(low: Array, high: Array) -> None:
    """BadRequest for nonzero elements of the outer diagonals that are outside the matrix."""
    if low[..., :1].any() or high[..., -1:].any():
        name = "dl" if low[..., :1].any() else "du"
        raise BadRequest(name, "an element outside of the matrix", "0 there: dl[0] and du[n - 1]")


def dense_of_three(request: Any, work: np.dtype[Any]) -> Array:
    """The matrices of the three diagonals; BadRequest for nonzero elements outside."""
    low, diagonal, high = (numbers(tensor, work) for tensor in (request.dl, request.d, request.du))
    check_ends(low, high)
    dense = np.zeros((*diagonal.shape, diagonal.shape[-1]), diagonal.dtype)
    each = np.arange(diagonal.shape[-1])
    dense[..., each, each] = diagonal
    dense[..., each[1:], each[:-1]] = low[..., 1:]
    dense[..., each[:-1], each[1:]] = high[..., :-1]
    return dense


def tridiagonal(request: Any, work: np.dtype[Any]) -> Results:
    """The solutions, by LAPACK's `gtsv`, which exchanges rows; NaN for a singular matrix."""
    from scipy.linalg import LinAlgError, solve_banded

    low, diagonal, high = (numbers(tensor, work) for tensor in (request.dl, request.d, request.du))
    check_ends(low, high)
    right = numbers(request.b, work)
    x = right.copy()
    for number in np.ndindex(diagonal.shape[:-1]):
        bands = np.stack([np.roll(high[number], 1), diagonal[number], np.roll(low[number], -1)])
        try:
            x[number] = solve_banded((1, 1), bands, right[number], check_finite=False) if right[number].size else 0
        except LinAlgError:
            x[number] = np.nan
    return {"out": x}


TRIDIAGONAL: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {"gtsv": tridiagonal}
