"""The sparse matrix of a request, or its parts, on the host: indices are checked, and the matrix is SciPy's.

SciPy does not check indices, and would read and write beyond arrays, so they are checked here each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import values as numbers  # `values` is an operand of sparse requests
from dispatch.core.matrix_choices import Operation
from dispatch.errors import BadRequest
from dispatch.ops.sparse.form import SparseFormat

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.sparse.form import SparseForm

__all__ = ["coo_of", "coordinates", "flaws", "matrix_of", "numbers", "op_of", "scaled"]


def flaws(form: SparseForm, rows: Array, columns: Array) -> Array:
    """The counts of `sparse_check`."""
    kind, (m, n), (high, wide) = SparseFormat(form.format), form.shape, form.block  # type: ignore[arg-type]
    m, n = m // high, n // wide
    if kind is SparseFormat.COO:
        major, minor, broken = rows.astype(np.int64) - form.base, columns.astype(np.int64) - form.base, 0
    else:
        offsets, indices = (columns, rows) if kind is SparseFormat.CSC else (rows, columns)
        ends, minor = offsets.astype(np.int64) - form.base, indices.astype(np.int64) - form.base
        broken = int((np.diff(ends) < 0).sum()) + int(ends[0] != 0) + int(ends[-1] != len(minor))
        if broken:
            outside = (minor < 0) | (minor >= (m if kind is SparseFormat.CSC else n))
            difference = np.diff(minor)[next_in_same_line(ends, len(minor))]
            return np.array([broken, outside.sum(), (difference < 0).sum(), (difference == 0).sum()], np.int64)
        major = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        if kind is SparseFormat.CSC:
            m, n = n, m
    outside = (major < 0) | (major >= m) | (minor < 0) | (minor >= n)
    later, same = np.diff(major), np.diff(minor)
    unsorted = (later < 0) | ((later == 0) & (same < 0))
    return np.array([broken, outside.sum(), unsorted.sum(), ((later == 0) & (same == 0)).sum()], np.int64)


def next_in_same_line(ends: Array, count: int) -> Array:
    """For each element but the last, whether the next one is in its line; offsets may be arbitrary.

    Its line is found by bisection: the first line that ends after it, if that begins before it.
    """
    lines, element = len(ends) - 1, np.arange(max(0, count - 1))
    low, high = np.zeros(len(element), np.int64), np.full(len(element), lines)
    while (low < high).any():
        middle = (low + high) // 2
        ended = (low < high) & (ends[np.minimum(middle + 1, lines)] <= element)
        high = np.where((low < high) & ~ended, middle, high)
        low = np.where(ended, middle + 1, low)
    is_there = low < lines
    line = np.where(is_there, low, 0)
    return np.asarray(is_there & (ends[line] <= element) & (element + 1 < ends[np.minimum(line + 1, lines)]))


def coordinates(form: SparseForm, rows: Any, columns: Any, name: str = "") -> tuple[Array, Array]:
    """The row and the column of each element, or block, from 0 on; BadRequest for one outside the matrix."""
    row, column = np.asarray(rows), np.asarray(columns)
    broken, outside, *_ = flaws(form, row, column).tolist()
    if broken or outside:
        wanted = f"those of a matrix {list(form.shape)} with base {form.base}"
        if form.format == SparseFormat.COO:
            raise BadRequest(f"{name}rows, {name}columns", f"{outside} indices beyond the matrix", wanted)
        ends, places = ("columns", "rows") if form.format == SparseFormat.CSC else ("rows", "columns")
        if broken:
            raise BadRequest(f"{name}{ends}", f"{broken} wrong offsets", wanted)
        raise BadRequest(f"{name}{places}", f"{outside} indices beyond the matrix", wanted)
    if form.format == SparseFormat.CSC:
        return row - form.base, np.repeat(np.arange(len(column) - 1), np.diff(column))
    if form.format == SparseFormat.COO:
        return row - form.base, column - form.base
    return np.repeat(np.arange(len(row) - 1), np.diff(row)), column - form.base


def matrix_of(request: Any, work: np.dtype[Any], prefix: str = "") -> Any:
    """The matrix of a request as SciPy's COO, without adding up duplicates; with its own values, or others."""
    import scipy.sparse as sp

    form = getattr(request, f"{prefix}form")
    values, rows, columns = (getattr(request, prefix + name) for name in ("values", "rows", "columns"))
    return coo_of(sp, form, numbers(values, work), *coordinates(form, rows, columns, prefix))


def coo_of(sp: Any, form: SparseForm, values: Array, row: Array, column: Array) -> Any:
    """A COO of values and the places of elements, or of blocks."""
    high, wide = form.block
    if form.format == SparseFormat.BSR:
        row = (row[:, None, None] * high + np.arange(high)[:, None] + 0 * np.arange(wide)).ravel()
        column = (column[:, None, None] * wide + 0 * np.arange(high)[:, None] + np.arange(wide)).ravel()
    return sp.coo_array((values.reshape(-1), (row, column)), shape=form.shape)


def op_of(matrix: Any, trans: Operation) -> Any:
    """op(A)."""
    if trans is Operation.N:
        return matrix
    return matrix.T if trans is Operation.T else matrix.conj().T


def scaled(request: Any, name: str, array: Array) -> Array:
    """A factor times an array, in the dtype of the array."""
    return np.asarray(array * array.dtype.type(request.factor(name)))
