"""Systems with three diagonals by LAPACK: what the host computes, and in float64 what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.errors import BadRequest
from dispatch.ops.sparse.ell_reference import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["TRIDIAGONAL", "dense_of_three"]


def check_ends(low: Array, high: Array) -> None:
    """BadRequest for elements of the outer diagonals that are none of the matrix."""
    if low[..., :1].any() or high[..., -1:].any():
        name = "dl" if low[..., :1].any() else "du"
        raise BadRequest(name, "an element beside the matrix", "0 there: dl[0] and du[n - 1]")


def dense_of_three(request: Any, work: np.dtype[Any]) -> Array:
    """The matrix, or the matrices, whose three diagonals are given; BadRequest for elements outside."""
    low, diagonal, high = (numbers(tensor, work) for tensor in (request.dl, request.d, request.du))
    check_ends(low, high)
    found = np.zeros((*diagonal.shape, diagonal.shape[-1]), diagonal.dtype)
    each = np.arange(diagonal.shape[-1])
    found[..., each, each] = diagonal
    found[..., each[1:], each[:-1]] = low[..., 1:]
    found[..., each[:-1], each[1:]] = high[..., :-1]
    return found


def tridiagonal(request: Any, work: np.dtype[Any]) -> Results:
    """The solutions, by LAPACK's `gtsv`, which lets rows change places; NaN of a singular matrix."""
    from scipy.linalg import LinAlgError, solve_banded

    low, diagonal, high = (numbers(tensor, work) for tensor in (request.dl, request.d, request.du))
    check_ends(low, high)
    right = numbers(request.b, work)
    found = right.copy()
    for number in np.ndindex(diagonal.shape[:-1]):
        bands = np.stack([np.roll(high[number], 1), diagonal[number], np.roll(low[number], -1)])
        try:
            found[number] = solve_banded((1, 1), bands, right[number], check_finite=False) if right[number].size else 0
        except LinAlgError:
            found[number] = np.nan
    return {"out": found}


TRIDIAGONAL: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {"gtsv": tridiagonal}
