"""Dense matrices pruned by NumPy: the host's results, and the expected ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import numpy_call
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["PRUNING", "numpy_pruning"]


def kept_mask(request: Any) -> Array:
    """Which elements remain."""
    sizes = np.abs(np.asarray(request.a))
    if request.threshold is not None:
        return np.asarray(sizes > sizes.dtype.type(request.threshold))
    if not sizes.size:
        return np.zeros(sizes.shape, bool)
    place = math.ceil(sizes.size * request.percentage / 100) - 1
    return np.asarray(sizes > np.sort(sizes, axis=None)[min(max(place, 0), sizes.size - 1)])


def counted(request: Any, work: np.dtype[Any]) -> Results:
    """The number of remaining elements."""
    del work
    return {"out": np.array([np.count_nonzero(kept_mask(request))], np.int64)}


def pruned(request: Any, work: np.dtype[Any]) -> Results:
    """The remaining elements, row by row; BadRequest unless their number is the expected one."""
    del work
    a, row_and_column = np.asarray(request.a), np.nonzero(kept_mask(request))
    row, column = row_and_column
    if len(row) != request.nnz:
        raise BadRequest("nnz", str(request.nnz), f"{len(row)}, the number that prune_nnz counts")
    ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=a.shape[0]))])
    return {"out_values": a[row, column], "out_rows": ends, "out_columns": column}


PRUNING: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {"prune_nnz": counted, "prune_to_csr": pruned}


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name."""
    return PRUNING[request.op](request, work)


numpy_pruning = numpy_call(evaluate)
