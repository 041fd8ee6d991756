"""Products of matrices in sliced and in blocked ELL by NumPy: the host's results, and the expected ones in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import numpy_call
from dispatch.errors import BadRequest
from dispatch.ops.sparse.matrix_reference import numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["ELL", "numpy_ell"]


def check_columns(columns: Array, extent: int) -> Array:
    """Which entries are elements, and not padding; BadRequest for columns beyond the matrix."""
    if (wrong := int(((columns < -1) | (columns >= extent)).sum())) > 0:
        raise BadRequest("columns", f"{wrong} beyond the matrix", f"from 0 to {extent - 1}, or -1")
    return columns >= 0


def by_slices(request: Any, work: np.dtype[Any]) -> Array:
    """A · x of sliced ELL; BadRequest for offsets that decrease, or are out of range. Padding reads no element of x."""
    values, columns = numbers(request.values, work), np.asarray(request.columns).astype(np.int64)
    ends, s = np.asarray(request.offsets).astype(np.int64), request.slice_size
    if ends[0] or ends[-1] != len(values) or (np.diff(ends) < 0).any() or (np.diff(ends) % s).any():
        raise BadRequest(
            "offsets",
            "decreasing ends, or ends that are not those of whole slices",
            f"the ends of {len(values)} elements",
        )
    place = np.arange(len(values)) - np.repeat(ends[:-1], np.diff(ends))
    row = np.repeat(np.arange(len(ends) - 1), np.diff(ends)) * s + place % s
    there = check_columns(columns, request.x.shape[0])
    if (row[there] >= request.m).any():
        raise BadRequest("columns", "elements after the last row", "-1 there")
    sums = np.zeros(request.m, values.dtype)
    np.add.at(sums, row[there], values[there] * numbers(request.x, work)[columns[there]])
    return sums


def by_blocks(request: Any, work: np.dtype[Any]) -> Array:
    """A · B of blocked ELL. Padding reads no row of B."""
    values, columns, size = numbers(request.values, work), np.asarray(request.columns).astype(np.int64), request.block
    (m, width), (n, k) = values.shape, request.b.shape
    there = check_columns(columns, n // size)
    blocks = values.reshape(m // size, size, width // size, size).transpose(0, 2, 1, 3)
    right = numbers(request.b, work).reshape(n // size, size, k)
    sums = np.zeros((m // size, size, k), values.dtype)
    for place in range(width // size):  # one block of each row of blocks at a time
        rows = np.flatnonzero(there[:, place])
        sums[rows] += blocks[rows, place] @ right[columns[rows, place]]
    return sums.reshape(m, k)


def multiplied(request: Any, work: np.dtype[Any]) -> Results:
    """alpha · A · x + beta · y, or of matrices."""
    result = (by_slices if request.op == "sell_mv" else by_blocks)(request, work)
    result = result * result.dtype.type(request.factor("alpha"))
    if request.reads_added:
        added = numbers(getattr(request, request.added), work)
        result = result + added * added.dtype.type(request.factor("beta"))
    return {"out": np.asarray(result)}


ELL: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {"sell_mv": multiplied, "blocked_ell_mm": multiplied}
numpy_ell = numpy_call(multiplied)
