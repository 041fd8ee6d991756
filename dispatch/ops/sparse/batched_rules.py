"""What rows of batches of sparse products take: each rule gives "needs …, has …", or ""."""

from __future__ import annotations

from typing import Any

from dispatch.ops.sparse.algorithms import SpmmAlgorithm
from dispatch.ops.sparse.form import SparseFormat

__all__ = ["dense_elements", "in_coo", "in_csr", "of_batches"]


def in_csr(request: Any) -> str:
    """Matrices in CSR."""
    kind = SparseFormat(request.form.format)
    return "" if kind is SparseFormat.CSR else f"needs CSR, has {kind.name}"


def in_coo(request: Any) -> str:
    """Matrices in COO."""
    kind = SparseFormat(request.form.format)
    return "" if kind is SparseFormat.COO else f"needs COO, has {kind.name}"


def of_batches(request: Any) -> str:
    """An algorithm for batches; COO_ALG3 is none, and faults where a matrix begins between multiples of 16 bytes."""
    if request.algorithm is not SpmmAlgorithm.COO_ALG3:
        return ""
    return "needs algorithm default, coo_alg1, coo_alg2 or coo_alg4 for a batch, has coo_alg3"


def dense_elements(request: Any) -> str:
    """A result in which the elements of each matrix are one behind another."""
    layout = request.layout_of("out")
    if not layout.size or layout.shape[-1] == 1 or layout.strides[-1] == 1:
        return ""
    return f"needs out with the elements of each matrix one behind another, has {layout}: leave it open"
