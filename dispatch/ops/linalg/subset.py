"""Some of the eigenvalues of a matrix, by index or by value: valid arguments, and the results."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_number, shown
from dispatch.core.operands import Output, dense
from dispatch.errors import BadRequest
from dispatch.keys import I64
from dispatch.ops.linalg.base import by_columns, real_of

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["check_subset", "eigen_outputs", "found_of", "subset_slice"]

ENDS = 2


def check_subset(request: Any) -> None:
    """BadRequest for an invalid subset; a list of numbers becomes a tuple of Python numbers."""
    n, index, values = request.a.shape[-1], request.subset_by_index, request.subset_by_value
    if index is not None and values is not None:
        raise BadRequest("subset_by_value", shown(values), "a subset by index or by value, not both")
    if index is not None:
        expected = (
            f"(first, last), with 0 <= first <= last < {n}" if n else "None, because the matrix has no eigenvalues"
        )
        pair = index if isinstance(index, tuple) and len(index) == ENDS else ()
        if not pair or any(type(one) is not int for one in pair) or not 0 <= pair[0] <= pair[1] < n:
            raise BadRequest("subset_by_index", shown(index), expected)
    if values is not None:
        if not isinstance(values, (tuple, list, np.ndarray)) or np.shape(values) != (ENDS,):
            raise BadRequest("subset_by_value", shown(values), "(low, high), with low < high")
        for one in values:
            check_number("subset_by_value", one)
        low, high = map(float, values)
        if not low < high:  # also true for NaN
            raise BadRequest("subset_by_value", shown(values), "(low, high), with low < high", "use -inf or inf")
        object.__setattr__(request, "subset_by_value", (low, high))


def found_of(request: Any) -> int:
    """How many eigenvalues the results have memory for."""
    if request.subset_by_index is None:
        return int(request.a.shape[-1])
    first, last = request.subset_by_index
    return int(last - first + 1)


def eigen_outputs(request: Any) -> dict[str, Output]:
    """The outputs of a request of real eigenvalues."""
    n, k, dtype = request.a.shape[-1], found_of(request), request.a.dtype
    outputs = {"w": dense((*request.batch, k), real_of(dtype))}
    if not request.eigvals_only:
        outputs["v"] = by_columns((*request.batch, n, k), dtype)
    if request.subset_by_value is not None:
        outputs["count"] = dense(request.batch, I64)
    return outputs | {"info": request.info_output()}


def subset_slice(request: Any, w: Array) -> slice:
    """The selected range of all eigenvalues, ascending."""
    if request.subset_by_index is not None:
        first, last = request.subset_by_index
        return slice(first, last + 1)
    low, high = request.subset_by_value or (-math.inf, math.inf)
    inside = np.flatnonzero((w > low) & (w <= high))
    return slice(inside[0], inside[-1] + 1) if inside.size else slice(0, 0)
