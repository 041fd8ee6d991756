"""The operands that rows of conversions between CSR, BSR and dense matrices support: a rule returns "needs …" or ""."""

from __future__ import annotations

from typing import Any

from dispatch.ops.sparse.form import SparseFormat

__all__ = ["dense_blocks", "only_bsr"]


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
