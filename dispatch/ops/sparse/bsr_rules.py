"""The operands that rows for BSR support, of conversions and products: a rule returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import Any

from dispatch.core.matrix_choices import Operation
from dispatch.ops.sparse import block_mma_kernels
from dispatch.ops.sparse.form import SparseFormat

__all__ = ["dense_blocks", "large_blocks", "only_bsr", "untransposed_blocks"]

# From so many rows of a block on, this library's kernels are faster: for 10^5 to 10^7 elements of f32 in blocks of 32
# and 8 to 512 columns of B they took 0.23 to 0.73 of cuSPARSE's time on an H200, for blocks of 64 0.18 to 0.51. For
# blocks of 16 they took 0.62 for 8 columns, but 1.1 and more otherwise, and for smaller blocks 0.91 to 1.8. By tensor
# cores they took 0.06 to 0.45 of it, for blocks of 16 to 128. For a batch cuSPARSE is called for each matrix, and took
# 5 to 11 times as long. One row of 1,248 to 5,000 blocks among 300 of 4 took 0.14 to 0.73 of cuSPARSE's time.
MIN_ROWS = 32
MIN_ROWS_FOR_FEW, FEW_COLUMNS = 16, range(2, 9)
BATCH = 3  # axes


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


def large_blocks(request: Any) -> str:
    """Blocks for which the kernel is faster than cuSPARSE, or which cuSPARSE does not support, or a batch.

    Any blocks if the request names the library, or compares the libraries by `autotune`.
    """
    high, wide = request.form.block
    is_fast = (
        high >= MIN_ROWS
        or block_mma_kernels.fits(request)
        or (high >= MIN_ROWS_FOR_FEW and request.b.shape[-1] in FEW_COLUMNS)
    )
    if is_fast or high != wide or request.b.ndim == BATCH or request.library == "own" or request.autotune:
        return ""
    few = f"{FEW_COLUMNS[0]} to {FEW_COLUMNS[-1]}"
    wanted = f"{MIN_ROWS} rows, or {MIN_ROWS_FOR_FEW} and f16, bf16 or {few} columns of b, or library own or autotune"
    return f"needs blocks of at least {wanted}, has {high} and {request.b.shape[-1]}"
