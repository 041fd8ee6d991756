"""Systems with five diagonals by LAPACK's banded solver: what the host computes, and in float64 what is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.errors import BadRequest
from dispatch.ops.sparse.pentadiagonal import DIAGONALS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["PENTADIAGONAL", "dense_of_five"]


def diagonals(request: Any, work: np.dtype[Any]) -> dict[str, Array]:
    """The diagonals in a working dtype; BadRequest for elements beside the matrix."""
    found = {}
    for name, off in DIAGONALS.items():
        given = np.asarray(getattr(request, name))
        outside = given[:-off] if off < 0 else given[len(given) - off :]
        if outside.any():
            raise BadRequest(
                name, "an element beside the matrix", f"0 in its {'first' if off < 0 else 'last'} {abs(off)}"
            )
        found[name] = given.astype(np.result_type(work, np.complex64) if given.dtype.kind == "c" else work, copy=False)
    return found


def dense_of_five(request: Any, work: np.dtype[Any]) -> Array:
    """The matrices, (batch, n, n)."""
    parts = diagonals(request, work)
    n, batch = request.d.shape
    found = np.zeros((batch, n, n), parts["d"].dtype)
    each = np.arange(n)
    for name, off in DIAGONALS.items():
        row = each[max(0, -off) : n - max(0, off)]
        found[:, row, row + off] = parts[name][row].T
    return found


def solved(request: Any, work: np.dtype[Any]) -> Results:
    """The solutions; NaN of a singular matrix."""
    from scipy.linalg import LinAlgError, solve_banded

    parts = diagonals(request, work)
    right = np.asarray(request.b).astype(parts["d"].dtype)
    found = right.copy()
    for j in range(right.shape[1]):
        bands = np.stack([np.roll(parts[name][:, j], off) for name, off in reversed(DIAGONALS.items())])
        try:
            found[:, j] = solve_banded((2, 2), bands, right[:, j], check_finite=False)
        except LinAlgError:
            found[:, j] = np.nan
    return {"out": found}


PENTADIAGONAL: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {"gpsv": solved}
