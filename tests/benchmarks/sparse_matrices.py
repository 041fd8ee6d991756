"""The matrices of bench_sparse in SciPy's CSR, with sorted i32 indices: one of each pattern for all tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

PATTERNS = ("poisson", "random", "power law")
LEAST, MOST = 2, 18  # elements of the short and the long rows of `stack_of`, ten on average


def poisson(n: int) -> Any:
    """Poisson's equation on a cube of n points a side."""
    import scipy.sparse as sp

    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    one = sp.eye_array(n)
    plane = sp.kron(line, one) + sp.kron(one, line)
    return (sp.kron(plane, one) + sp.kron(sp.eye_array(n * n), line)).tocsr()


@cache
def pattern_of(pattern: str, nnz: int) -> Any:
    """The matrix of a pattern with about so many elements; one for all tables."""
    import scipy.sparse as sp

    rng = np.random.default_rng(7)
    if pattern == "poisson":
        found = poisson(round((nnz / 7) ** (1 / 3)))
    else:
        n = nnz // 10
        if pattern == "random":
            columns = rng.integers(0, n, (n, 10))
        else:
            columns = np.minimum((n * rng.power(0.4, (n, 10))).astype(np.int64), n - 1)
        columns.sort(axis=1)
        rows = np.arange(0, 10 * n + 1, 10)
        found = sp.csr_array((rng.standard_normal(10 * n), columns.ravel(), rows), shape=(n, n))
        found.sum_duplicates()
    found.sort_indices()
    return found


def in_dtype(matrix: Any, dtype: str) -> Any:
    """A matrix in CSR with elements of a dtype and i32 indices."""
    import scipy.sparse as sp

    parts = (matrix.data.astype(dtype), matrix.indices.astype("i4"), matrix.indptr.astype("i4"))
    return sp.csr_array(parts, matrix.shape)


def stack_of(count: int, rows: int, *, even: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values, offsets and columns of so many square matrices, each with ten elements a row, or about ten."""
    rng = np.random.default_rng(7)
    lengths = np.full(rows, (LEAST + MOST) // 2)
    if not even:
        lengths[: rows // 2 * 2 : 2], lengths[1 : rows // 2 * 2 : 2] = LEAST, MOST
    orders = np.array([rng.permutation(lengths) for _ in range(count)])
    offsets = np.concatenate([np.zeros((count, 1), np.int64), np.cumsum(orders, axis=1)], axis=1)
    columns = rng.integers(0, rows, (count, int(lengths.sum())))
    # Sorted in each row, by the row in front of the column.
    keys = np.array([np.repeat(np.arange(rows), order) for order in orders]) * rows + columns
    columns = np.sort(keys, axis=1) % rows
    return rng.standard_normal(columns.shape), offsets.astype("i4"), columns.astype("i4")


@cache
def blocks_of(nnz: int, size: int) -> Any:
    """Blocks at random, ten in each row of them, with about so many elements: in SciPy's BSR."""
    import scipy.sparse as sp

    rng, lines = np.random.default_rng(7), max(2, nnz // (10 * size * size))
    each = min(10, lines)
    columns = np.array([np.sort(rng.choice(lines, each, replace=False)) for _ in range(lines)]).ravel()
    values = rng.standard_normal((lines * each, size, size), np.float32)
    rows = np.arange(0, lines * each + 1, each)
    return sp.bsr_array((values, columns.astype("i4"), rows.astype("i4")), shape=(lines * size, lines * size))


@cache
def coupled(n: int, size: int) -> Any:
    """Poisson's equation with so many unknowns in each point, which are coupled more strongly than points are."""
    import scipy.sparse as sp

    point = 100 * np.array([[0.9 ** abs(i - j) for j in range(size)] for i in range(size)])
    one = sp.eye_array(n**3)
    found = (sp.kron(poisson(n), sp.eye_array(size)) + sp.kron(one, point)).tocsr()
    found.sort_indices()
    return found
