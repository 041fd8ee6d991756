"""Conversions between CSR and BSR by SciPy: the host's results, and the expected ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.sparse.bsr_conversions import refuse_count
from dispatch.ops.sparse.matrix_reference import coordinates, flaws, matrix_of, numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results

__all__ = ["BLOCKS"]

UNSORTED = 2  # index into the counts of `flaws`


def in_blocks(request: Any, work: np.dtype[Any]) -> tuple[Any, int]:
    """The matrix in BSR with sorted blocks, and their number; or minus the number of unsorted elements, if any.

    Duplicate elements are added up even where a row has a single block; SciPy's BSR would not add them there.
    """
    matrix = matrix_of(request, work)  # checks that the indices are within the matrix
    blocked = matrix.tocsr().tobsr(blocksize=request.block)
    blocked.sort_indices()
    unsorted = int(flaws(request.form, np.asarray(request.rows), np.asarray(request.columns))[UNSORTED])
    return blocked, -unsorted or len(blocked.indices)


def blocks_counted(request: Any, work: np.dtype[Any]) -> Results:
    """How many blocks have an element."""
    return {"out": np.array([in_blocks(request, work)[1]], np.int64)}


def made_blocks(request: Any, work: np.dtype[Any]) -> Results:
    """The blocks; BadRequest if their number is not the expected one."""
    found, count = in_blocks(request, work)
    refuse_count(request.nnzb, count)
    base = request.form.base
    rows, columns = (part.astype(np.int64) + base for part in (found.indptr, found.indices))
    return {"out_values": found.data, "out_rows": rows, "out_columns": columns}


def expanded_blocks(request: Any, work: np.dtype[Any]) -> Results:
    """Every element of every block, in CSR."""
    import scipy.sparse as sp

    form, (rows, columns) = request.form, (np.asarray(part) for part in (request.rows, request.columns))
    coordinates(form, rows, columns)  # checks the indices, which SciPy does not
    parts = (numbers(request.values, work), columns - form.base, rows - form.base)
    expanded = sp.bsr_array(parts, shape=form.shape, blocksize=form.block).tocsr()
    offsets, indices = (part.astype(np.int64) + form.base for part in (expanded.indptr, expanded.indices))
    return {"out_values": expanded.data, "out_rows": offsets, "out_columns": indices}


BLOCKS: dict[str, Callable[[Any, np.dtype[Any]], Results]] = {
    "csr2bsr_nnz": blocks_counted,
    "csr2bsr": made_blocks,
    "bsr2csr": expanded_blocks,
}
