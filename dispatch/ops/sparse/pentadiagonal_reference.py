"""Systems with five diagonals by LAPACK's banded solver: the host's results, and the expected ones in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import values
from dispatch.errors import BadRequest
from dispatch.ops.sparse.pentadiagonal import DIAGONALS

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["PENTADIAGONAL", "dense_of_five"]


def diagonals(request: Any, work: np.dtype[Any]) -> dict[str, Array]:
    """The diagonals in a working dtype; BadRequest for nonzero elements outside the matrix."""
    parts = {}
    for name, off in DIAGONALS.items():
        band = np.asarray(getattr(request, name))
        outside = band[:-off] if off < 0 else band[len(band) - off :]
        if outside.any():
            raise BadRequest(
                name, "an element outside of the matrix", f"0 in its {'first' if off < 0 else 'last'} {abs(off)}"
            )
        parts[name] = values(band, work)
    return parts


def dense_of_five(request: Any, work: np.dtype[Any]) -> Array:
    """The matrices, (batch, n, n)."""
    parts = diagonals(request, work)
    n, batch = request.d.shape
    dense = np.zeros((batch, n, n), parts["d"].dtype)
    each = np.arange(n)
    for name, off in DIAGONALS.items():
        row = each[max(0, -off) : n - max(0, off)]
        dense[:, row, row + off] = parts[name][row].T
    return dense


def solved(request: Any, work: np.dtype[Any]) -> Results:
    """The solutions; NaN for a singular matrix."""
    from scipy.linalg import LinAlgError, solve_banded

    parts = diagonals(request, work)
    right = np.asarray(request.b).astype(parts["d"].dtype)
    solution = right.copy()
    for j in range(right.shape[1]):
        bands = np.stack([np.roll(parts[name][:, j], off) for name, off in reversed(DIAGONALS.items())])
        try:
            solution[:, j] = solve_banded((2, 2), bands, right[:, j], check_finite=False)
        except LinAlgError:
            solution[:, j] = np.nan
    return {"out": solution}


PENTADIAGONAL: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {"gpsv": solved}
