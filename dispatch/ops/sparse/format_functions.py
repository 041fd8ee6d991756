"""A sparse matrix in another format, in SciPy's words: `tocsr`, `tocsc`, `tocoo` and `tobsr`.

Between CSR and BSR indices are of any width. The requests of the other conversions take i32 alone: indices of i64 are
converted, if the matrix's extents allow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.request import run
from dispatch.errors import BadRequest
from dispatch.keys import I32
from dispatch.ops import sparse as ops
from dispatch.ops.sparse.bsr_conversions import check_block
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.sources import sparse_tensor
from dispatch.ops.sparse.tensor import SparseTensor

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["as_sparse", "tobsr", "tocoo", "tocsc", "tocsr", "with_i32_indices"]

MAX_I32 = np.iinfo(np.int32).max


def as_sparse(a: Any) -> SparseTensor:
    """A sparse operand as a SparseTensor."""
    return a if isinstance(a, SparseTensor) else sparse_tensor(a)


def tocsr(a: Any) -> SparseTensor:
    """The matrix in CSR: itself, of CSC by the request `csr2csc`, of COO by `coo2csr`, or of BSR by `bsr2csr`.

    Of BSR it has every element of every block. Of CSC and COO indices of i64 become i32 on the host, which is waited
    for.
    """
    found = as_sparse(a)
    if found.format is SparseFormat.BSR:
        values, rows, columns = run(ops.Bsr2csrRequest(*found.parts))
        form = found.form._replace(format=SparseFormat.CSR, block=(1, 1), pattern=None)
        return SparseTensor(values, rows, columns, form)
    if found.format is SparseFormat.COO:
        found = with_i32_indices(found)
        rows = run(ops.Coo2csrRequest(found.rows, m=found.shape[0], base=found.form.base))
        form = found.form._replace(format=SparseFormat.CSR, pattern=None)
        return SparseTensor(found.values, rows, found.columns, form)
    return found if found.format is SparseFormat.CSR else _convert_compressed(found, SparseFormat.CSR)


def tocsc(a: Any) -> SparseTensor:
    """The matrix in CSC: itself, or of CSR by the request `csr2csc`, of others by way of CSR; i64 becomes i32."""
    found = as_sparse(a)
    return found if found.format is SparseFormat.CSC else _convert_compressed(tocsr(found), SparseFormat.CSC)


def tocoo(a: Any) -> SparseTensor:
    """The matrix in COO: itself, or of CSR by the request `csr2coo`, of others by way of CSR; i64 becomes i32."""
    found = as_sparse(a)
    if found.format is SparseFormat.COO:
        return found
    found = with_i32_indices(tocsr(found))
    rows = run(ops.Csr2cooRequest(found.rows, nnz=found.nnz, base=found.form.base))
    form = found.form._replace(format=SparseFormat.COO, pattern=None)
    return SparseTensor(found.values, rows, found.columns, form)


def tobsr(a: Any, blocksize: tuple[int, int], *, nnzb: int | None = None) -> SparseTensor:
    """The matrix in BSR, of blocks of so many rows and columns: itself, or of CSR by the request `csr2bsr`.

    It has the blocks in which an element is stored, 0 or not; what they have beside it is 0. Others than CSR, and other
    blocks, go by way of `tocsr`. Without `nnzb`, how many blocks there are, the request `csr2bsr_nnz` counts them
    before, and is waited for; rows that it finds unsorted are sorted, for which indices of i64 become i32. BadRequest
    for a block that does not divide the matrix; with `nnzb` for another number, and for unsorted rows.
    """
    found = as_sparse(a)
    block = check_block("blocksize", blocksize, found.shape)
    if found.format is SparseFormat.BSR and found.form.block == block:
        return found
    found = tocsr(found)
    if nnzb is None:
        nnzb = count_blocks(found, block)
        if nnzb < 0:
            found = with_i32_indices(found)
            found = SparseTensor(*run(ops.SparseSortRequest(*found.parts)), found.form._replace(pattern=None))
            nnzb = count_blocks(found, block)
    values, rows, columns = run(ops.Csr2bsrRequest(*found.parts, block=block, nnzb=nnzb))
    form = found.form._replace(format=SparseFormat.BSR, block=block, pattern=None)
    return SparseTensor(values, rows, columns, form)


def count_blocks(a: SparseTensor, block: tuple[int, int]) -> int:
    """The number of blocks with an element; waits for it. Below 0 if rows are not sorted."""
    return int(run(ops.Csr2bsrNnzRequest(*a.parts, block=block)).item())


def with_i32_indices(a: SparseTensor) -> SparseTensor:
    """The matrix with indices of i32; BadRequest where these do not count its rows, columns or elements."""
    if a.rows.dtype is I32 and a.columns.dtype is I32:
        return a
    if max(*a.shape, a.nnz) + a.form.base > MAX_I32:
        expected = f"at most {MAX_I32} rows, columns and elements, which indices of i32 count"
        raise BadRequest("a", repr(a), expected, "convert it before: a.tocsr() of SciPy or CuPy")
    return SparseTensor(a.values, _as_i32("rows", a.rows), _as_i32("columns", a.columns), a.form)


def _as_i32(name: str, part: Tensor) -> Tensor:
    """Indices converted to i32 by the host, which checks that each fits."""
    if part.dtype is I32:
        return part
    given = part.numpy()
    if given.size and not 0 <= given.min() <= given.max() <= MAX_I32:
        raise BadRequest(name, f"indices from {given.min()} to {given.max()}", f"those from 0 to {MAX_I32}")
    return part.device.array(given.astype(np.int32))


def _convert_compressed(a: SparseTensor, wanted: SparseFormat) -> SparseTensor:
    values, rows, columns = run(ops.Csr2cscRequest(*with_i32_indices(a).parts))
    return SparseTensor(values, rows, columns, a.form._replace(format=wanted, pattern=None))
