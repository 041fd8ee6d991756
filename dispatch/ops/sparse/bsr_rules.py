"""The operands that rows of conversions between CSR, BSR and dense matrices support: a rule returns "needs …" or ""."""

from __future__ import annotations

from typing import Any

from dispatch.core.matrix_choices import Operation
from dispatch.ops.sparse.form import SparseFormat

__all__ = ["dense_blocks", "only_bsr", "several_columns", "untransposed_blocks"]

MIN_COLUMNS = 2  # of B: a product with one column is cuSPARSE's


def only_bsr(request: Any) -> str:
    """A matrix of blocks."""
    kind = SparseFormat(request.form.format)
    return "" if kind is SparseFormat.BSR else f"needs BSR, has {kind.name}"


def dense_blocks(request: Any) -> str:
    """Contiguous blocks of the result, each with contiguous rows."""
    layout = request.layout_of("out_values")
    return (
        "" if not layout.size or layout.is_contiguous else f"needs out_values dense, has {layout}: pass out_values=None"
    )


def untransposed_blocks(request: Any) -> str:
    """A matrix of blocks as it is: the kernel adds up along its rows of blocks."""
    kind, trans = SparseFormat(request.form.format), request.trans
    if kind is SparseFormat.BSR and trans is Operation.N:
        return ""
    return f"needs BSR with trans n, has {kind.name} with {trans.name.lower()}"


def several_columns(request: Any) -> str:
    """A B of several columns, or blocks that cuSPARSE does not take; any number if the request names the library."""
    columns, (high, wide) = request.b.shape[-1], request.form.block
    if columns >= MIN_COLUMNS or high != wide or request.library == "own":
        return ""
    return f"needs at least {MIN_COLUMNS} columns of b, blocks that are not square, or library own, has {columns}"
