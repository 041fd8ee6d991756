"""Incomplete factorizations by NumPy, row by row: the host's results, and the expected ones in float64."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import numpy_call
from dispatch.errors import BadRequest
from dispatch.ops.sparse.matrix_reference import coordinates, flaws, numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = ["INCOMPLETE", "numpy_incomplete"]


def factored(request: Any, work: np.dtype[Any], eliminate: Callable[..., int]) -> Results:
    """The factors of a matrix's rows; NaN, and the row, if a pivot is missing."""
    values, base = numbers(request.values, work).copy(), request.form.base
    _, columns = coordinates(request.form, request.rows, request.columns)
    *_, unsorted, doubled = flaws(request.form, np.asarray(request.rows), np.asarray(request.columns)).tolist()
    if unsorted or doubled:
        counts = f"{unsorted} unsorted elements and {doubled} that are stored twice"
        raise BadRequest("columns", counts, "each element once, sorted in each row", "dispatch.sparse.sort sorts")
    ends = np.asarray(request.rows).astype(np.int64) - base
    lines = [slice(begin, end) for begin, end in pairwise(ends.tolist())]
    places = [dict(zip(columns[line].tolist(), range(line.start, line.stop), strict=True)) for line in lines]
    missing = next((row for row, line in enumerate(places) if row not in line), None)
    with np.errstate(all="ignore"):
        info = 1 + missing if missing is not None else eliminate(values, places)
    if info:
        values[...] = complex(np.nan, np.nan) if values.dtype.kind == "c" else np.nan
    return {"out": values, "info": np.asarray(np.int32(info))}


def eliminate_lu(values: Array, places: list[dict[int, int]]) -> int:
    """L · U in place, each row from those above it; 1 + the first row whose pivot is 0, or 0."""
    for row, line in enumerate(places):
        for k in sorted(column for column in line if column < row):
            factor = values[line[k]] = values[line[k]] / values[places[k][k]]
            for column, place in places[k].items():
                if column > k and column in line:
                    values[line[column]] -= factor * values[place]
        if values[line[row]] == 0:
            return 1 + row
    return 0


def eliminate_cholesky(values: Array, places: list[dict[int, int]]) -> int:
    """L · Lᴴ in place; 1 + the first row whose pivot is not positive, or 0."""
    for row, line in enumerate(places):
        below = sorted(column for column in line if column < row)
        for k in below:
            other = places[k]
            sums = sum(values[line[j]] * np.conj(values[other[j]]) for j in below if j < k and j in other)
            values[line[k]] = (values[line[k]] - sums) / values[other[k]]
        diagonal = values[line[row]]
        pivot = np.real(diagonal) + 0 * np.imag(diagonal)  # the imaginary part is ignored, unless it is NaN
        pivot = pivot - sum(abs(values[line[k]]) ** 2 for k in below)
        if not pivot > 0:
            return 1 + row
        values[line[row]] = np.sqrt(pivot)
    return 0


INCOMPLETE: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {
    "ilu0": lambda request, work: factored(request, work, eliminate_lu),
    "ic0": lambda request, work: factored(request, work, eliminate_cholesky),
}


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name."""
    return INCOMPLETE[request.op](request, work)


numpy_incomplete = numpy_call(evaluate)
