"""The operands that rows of batched sparse products support: each rule returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import Any

from dispatch.ops.sparse.algorithms import SpmmAlgorithm
from dispatch.ops.sparse.form import SparseFormat

__all__ = ["axes_of", "batch_algorithm", "dense_elements", "in_bsr", "in_coo", "in_csc", "in_csr", "nnz_of"]

BLOCK_AXES = 3  # of the elements of a matrix in BSR: blocks, and their rows and columns


def axes_of(request: Any, name: str) -> int:
    """The number of axes of one of the three parts of a matrix, without the batch axis."""
    return BLOCK_AXES if name == "values" and request.form.format == SparseFormat.BSR else 1


def nnz_of(request: Any) -> int:
    """The number of elements, or blocks, of a matrix, or of each matrix of a batch."""
    count: int = request.values.shape[-axes_of(request, "values")]
    return count


def in_csr(request: Any) -> str:
    """Matrices in CSR."""
    return has_format(request, SparseFormat.CSR)


def in_csc(request: Any) -> str:
    """Matrices in CSC."""
    return has_format(request, SparseFormat.CSC)


def in_bsr(request: Any) -> str:
    """Matrices in BSR."""
    return has_format(request, SparseFormat.BSR)


def in_coo(request: Any) -> str:
    """Matrices in COO."""
    return has_format(request, SparseFormat.COO)


def has_format(request: Any, wanted: SparseFormat) -> str:
    """Matrices in a format."""
    kind = SparseFormat(request.form.format)
    return "" if kind is wanted else f"needs {wanted.name}, has {kind.name}"


def batch_algorithm(request: Any) -> str:
    """An algorithm for batches; COO_ALG3 is not, and faults if a matrix does not begin at a multiple of 16 bytes."""
    if request.algorithm is not SpmmAlgorithm.COO_ALG3:
        return ""
    return "needs algorithm default, coo_alg1, coo_alg2 or coo_alg4 for a batch, has coo_alg3"


def dense_elements(request: Any) -> str:
    """A result in which the elements of each matrix are contiguous."""
    layout = request.layout_of("out")
    if not layout.size or layout.shape[-1] == 1 or layout.strides[-1] == 1:
        return ""
    return f"needs out with the elements of each matrix contiguous, has {layout}: pass out=None"
