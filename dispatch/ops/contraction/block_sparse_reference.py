"""The expected results of block-sparse contractions, by NumPy, for each pair of blocks; and their error bounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, NumpyPlan, values, work_of
from dispatch.keys import C128, F64
from dispatch.ops.contraction.block_sparse import block_offsets, matching_blocks
from dispatch.ops.contraction.reference import einsum_of
from dispatch.testing.check import rounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.ops.contraction.block_sparse import BlockSparseForm
    from dispatch.ops.contraction.block_sparse_request import ContractBlockSparseRequest

__all__ = ["block_sparse_bounds", "block_sparse_evaluate", "numpy_block_sparse"]

Block = tuple[int, ...]


def blocks_of(flat: Array, form: BlockSparseForm, offsets: tuple[int, ...]) -> dict[Block, Array]:
    """Views of the blocks in a tensor of one axis, by block index."""
    blocks = {}
    for block, offset in zip(form.blocks, offsets, strict=False):  # the last offset is the end
        shape = form.shape_of(block)
        blocks[block] = flat[offset : offset + math.prod(shape)].reshape(shape)
    return blocks


def gap_mask(form: BlockSparseForm, offsets: tuple[int, ...]) -> Array:
    """A mask of the elements of a tensor of one axis that belong to no block."""
    mask = np.ones(offsets[-1], bool)
    for block in blocks_of(mask, form, offsets).values():
        block[...] = False
    return mask


def block_sparse_evaluate(request: ContractBlockSparseRequest, work: np.dtype[Any]) -> Results:
    """D = alpha · Σ A · B + beta · C, for the blocks of D; 0 between them."""
    return {"out": _sum(request, work, np.asarray)}


def _sum(request: ContractBlockSparseRequest, work: np.dtype[Any], of: Callable[[Any], Any]) -> Array:
    """The result, with the function `of` applied to the elements and the factors."""
    (in_a, in_b), output = request.parsed
    dtype, form = request.a.dtype, request.d_form
    a, b = (
        blocks_of(
            of(values(getattr(request, name), work)),
            request.form_of(name),
            block_offsets(request.form_of(name), dtype),
        )
        for name in ("a", "b")
    )
    kind = of(np.zeros((), np.result_type(work, np.complex64) if dtype.is_complex else work)).dtype
    offsets = block_offsets(form, dtype)
    flat = np.zeros(offsets[-1], kind)
    alpha, beta = (kind.type(of(request.factor(name))) for name in request.numbers)
    if alpha != 0:
        out = blocks_of(flat, form, offsets)
        for one, other in matching_blocks((in_a, in_b), request.a_form.blocks, request.b_form.blocks):
            index_of = {**dict(zip(in_a, one, strict=True)), **dict(zip(in_b, other, strict=True))}
            target = out.get(tuple(index_of[mode] for mode in output))
            if target is not None:
                target += einsum_of([a[one], b[other]], [in_a, in_b], output)
        flat *= alpha
    if request.reads_added:
        flat += beta * of(values(request.c, work))
    flat[gap_mask(form, offsets)] = 0  # even if c has other values there
    return flat


def block_sparse_bounds(request: Any, expected: Results) -> Results:
    """The error bound of each element: that of a sum of n grows with √n of its roundoffs.

    Between blocks the result is 0; if the result is also the added operand, it may be anything there.
    """
    out, dtype, form = expected["out"], request.a.dtype, request.d_form
    unit = (2.0**-53 if dtype in (F64, C128) else 2.0**-24) * (2 if dtype.is_complex else 1)
    size = _sum(request, EXACT, np.abs)
    count = math.prod(sum(one) for mode, one in request.sections.items() if mode not in request.parsed[1])
    error = (8 + 4 * math.sqrt(count)) * unit * size
    allowed = rounded(error, out, dtype)
    if request.reads_added and request.out is not None and request.out.ptr == request.c.ptr:
        allowed = np.where(gap_mask(form, block_offsets(form, dtype)), np.inf, allowed)
    return {"out": allowed}


def numpy_block_sparse(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy: in f64 if the operands are f64 or c128, else in f32."""
    del executor
    return NumpyPlan(row, block_sparse_evaluate, work_of(request.a.dtype))
