"""The rules of block-sparse contractions beyond dtypes: each returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.layouts import at_multiples
from dispatch.ops.contraction.block_sparse import ALIGNMENT

if TYPE_CHECKING:
    from dispatch.ops.contraction.block_sparse_request import ContractBlockSparseRequest

__all__ = ["aligned_blocks", "blocks_to_add", "few_axes"]

MAX_AXES = 32


def few_axes(request: ContractBlockSparseRequest) -> str:
    """At most as many axes as cuTENSOR supports for a block-sparse tensor."""
    for name in ("a", "b", "out"):
        if (count := len(request.modes_of(name))) > MAX_AXES:
            return f"needs {MAX_AXES} modes at most of {name}, has {count}: merge some of them"
    return ""


def aligned_blocks(request: ContractBlockSparseRequest) -> str:
    """Blocks are aligned like newly allocated memory: cuTENSOR's descriptor has no alignment.

    GPU memory is aligned like this, whichever library allocates it. Host memory is not, and NumPy reads it at any
    address.
    """
    return "" if request.device.is_host else at_multiples(request, ALIGNMENT)


def blocks_to_add(request: ContractBlockSparseRequest) -> str:
    """Something is added to a product, and the product is not empty."""
    for name in ("a", "b"):
        if request.reads_added and not request.form_of(name).blocks:
            return f"needs a block of {name} where c is added, has none: the result is beta · c"
    return ""
