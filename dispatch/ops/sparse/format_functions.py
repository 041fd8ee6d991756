"""Conversions of sparse matrices under SciPy's names: `tocsr`, `tocsc`, `tocoo` and `tobsr`.

Between CSR and BSR indices may have any width. The requests of the other conversions support i32 only: i64 indices are
converted, if the matrix's extents allow it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import names_arguments
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


def as_sparse(a: Any, name: str = "a") -> SparseTensor:
    """A sparse operand as a SparseTensor; errors of what is none have the argument's name."""
    if isinstance(a, SparseTensor):
        return a
    try:
        return sparse_tensor(a)
    except BadRequest as error:
        raise error.about(name) if error.operand == "matrix" else error from None


@names_arguments
def tocsr(a: Any) -> SparseTensor:
    """The matrix in CSR: itself, or from CSC by the request `csr2csc`, from COO by `coo2csr`, from BSR by `bsr2csr`.

    From BSR it has every element of every block. For CSC and COO i64 indices are converted to i32 on the host, which
    waits for them.
    """
    matrix = as_sparse(a)
    if matrix.format is SparseFormat.BSR:
        values, rows, columns = run(ops.Bsr2csrRequest(*matrix.parts))
        form = matrix.form._replace(format=SparseFormat.CSR, block=(1, 1), pattern=None)
        return SparseTensor(values, rows, columns, form)
    if matrix.format is SparseFormat.COO:
        matrix = with_i32_indices(matrix)
        rows = run(ops.Coo2csrRequest(matrix.rows, m=matrix.shape[0], base=matrix.form.base))
        form = matrix.form._replace(format=SparseFormat.CSR, pattern=None)
        return SparseTensor(matrix.values, rows, matrix.columns, form)
    return matrix if matrix.format is SparseFormat.CSR else _convert_compressed(matrix, SparseFormat.CSR)


@names_arguments
def tocsc(a: Any) -> SparseTensor:
    """The matrix in CSC: itself, or from CSR by the request `csr2csc`, from others by way of CSR; i64 becomes i32."""
    matrix = as_sparse(a)
    return matrix if matrix.format is SparseFormat.CSC else _convert_compressed(tocsr(matrix), SparseFormat.CSC)


@names_arguments
def tocoo(a: Any) -> SparseTensor:
    """The matrix in COO: itself, or from CSR by the request `csr2coo`, from others by way of CSR; i64 becomes i32."""
    matrix = as_sparse(a)
    if matrix.format is SparseFormat.COO:
        return matrix
    matrix = with_i32_indices(tocsr(matrix))
    rows = run(ops.Csr2cooRequest(matrix.rows, nnz=matrix.nnz, base=matrix.form.base))
    form = matrix.form._replace(format=SparseFormat.COO, pattern=None)
    return SparseTensor(matrix.values, rows, matrix.columns, form)


@names_arguments
def tobsr(a: Any, blocksize: tuple[int, int], *, nnzb: int | None = None) -> SparseTensor:
    """The matrix in BSR, with blocks of this size: itself, or from CSR by the request `csr2bsr`.

    It has the blocks in which an element is stored, even a 0; the other elements of these are 0. Other formats, and
    other block sizes, are converted by way of `tocsr`. Without `nnzb`, the number of blocks, the request `csr2bsr_nnz`
    counts them first, and the call waits for it; unsorted rows are sorted then, for which i64 indices become i32.
    BadRequest for a block that does not divide the matrix; with `nnzb` also for another number, and for unsorted rows.
    """
    matrix = as_sparse(a)
    block = check_block("blocksize", blocksize, matrix.shape)
    if matrix.format is SparseFormat.BSR and matrix.form.block == block:
        return matrix
    matrix = tocsr(matrix)
    if nnzb is None:
        nnzb = count_blocks(matrix, block)
        if nnzb < 0:
            matrix = with_i32_indices(matrix)
            matrix = SparseTensor(*run(ops.SparseSortRequest(*matrix.parts)), matrix.form._replace(pattern=None))
            nnzb = count_blocks(matrix, block)
    values, rows, columns = run(ops.Csr2bsrRequest(*matrix.parts, block=block, nnzb=nnzb))
    form = matrix.form._replace(format=SparseFormat.BSR, block=block, pattern=None)
    return SparseTensor(values, rows, columns, form)


def count_blocks(a: SparseTensor, block: tuple[int, int]) -> int:
    """The number of blocks with an element; waits for it. Negative if rows are not sorted."""
    return int(run(ops.Csr2bsrNnzRequest(*a.parts, block=block)).item())


def with_i32_indices(a: SparseTensor) -> SparseTensor:
    """The matrix with indices of i32; BadRequest if these are too narrow for its rows, columns or elements."""
    if a.rows.dtype is I32 and a.columns.dtype is I32:
        return a
    if max(*a.shape, a.nnz) + a.form.base > MAX_I32:
        expected = f"at most {MAX_I32} rows, columns and elements, the range of i32 indices"
        raise BadRequest("a", repr(a), expected, "convert it first: a.tocsr() of SciPy or CuPy")
    return SparseTensor(a.values, _as_i32("rows", a.rows), _as_i32("columns", a.columns), a.form)


def _as_i32(name: str, part: Tensor) -> Tensor:
    """Indices converted to i32 by the host, which checks that each fits."""
    if part.dtype is I32:
        return part
    wide = part.numpy()
    if wide.size and not 0 <= wide.min() <= wide.max() <= MAX_I32:
        raise BadRequest(name, f"indices from {wide.min()} to {wide.max()}", f"indices from 0 to {MAX_I32}")
    return part.device.array(wide.astype(np.int32))


def _convert_compressed(a: SparseTensor, wanted: SparseFormat) -> SparseTensor:
    values, rows, columns = run(ops.Csr2cscRequest(*with_i32_indices(a).parts))
    return SparseTensor(values, rows, columns, a.form._replace(format=wanted, pattern=None))
