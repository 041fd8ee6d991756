"""What is right of block-sparse contractions, in NumPy, pair of blocks by pair; and how far a result may be off."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, NumpyPlan, work_of
from dispatch.keys import C128, F64
from dispatch.ops.contraction.block_sparse import block_offsets, matching_blocks
from dispatch.ops.contraction.reference import einsum_of, work_array
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
    """Views of the blocks in a tensor of one axis, by their places."""
    found = {}
    for block, offset in zip(form.blocks, offsets, strict=False):  # the last number is the end
        shape = form.shape_of(block)
        found[block] = flat[offset : offset + math.prod(shape)].reshape(shape)
    return found


def gap_mask(form: BlockSparseForm, offsets: tuple[int, ...]) -> Array:
    """Which elements of a tensor of one axis are no block's."""
    found = np.ones(offsets[-1], bool)
    for block in blocks_of(found, form, offsets).values():
        block[...] = False
    return found


def block_sparse_evaluate(request: ContractBlockSparseRequest, work: np.dtype[Any]) -> Results:
    """D = alpha · Σ A · B + beta · C, of the blocks that D has; between them is 0."""
    return {"out": _sum(request, work, np.asarray)}


def _sum(request: ContractBlockSparseRequest, work: np.dtype[Any], of: Callable[[Any], Any]) -> Array:
    """The result, of what `of` makes of the elements and the factors."""
    (in_a, in_b), output = request.parsed
    dtype, form = request.a.dtype, request.d_form
    a, b = (
        blocks_of(
            of(work_array(getattr(request, name), work)),
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
            known = {**dict(zip(in_a, one, strict=True)), **dict(zip(in_b, other, strict=True))}
            target = out.get(tuple(known[mode] for mode in output))
            if target is not None:
                target += einsum_of([a[one], b[other]], [in_a, in_b], output)
        flat *= alpha
    if request.reads_c:
        flat += beta * of(work_array(request.c, work))
    flat[gap_mask(form, offsets)] = 0  # whatever c has there
    return flat


def block_sparse_bounds(request: Any, expected: Results) -> Results:
    """How far each element may be off: a sum of n walks like √n of its roundoffs.

    Between blocks is 0; where the result is what is added to, it may be anything.
    """
    out, dtype, form = expected["out"], request.a.dtype, request.d_form
    unit = (2.0**-53 if dtype in (F64, C128) else 2.0**-24) * (2 if dtype.is_complex else 1)
    size = _sum(request, EXACT, np.abs)
    count = math.prod(sum(one) for mode, one in request.sections.items() if mode not in request.parsed[1])
    error = (8 + 4 * math.sqrt(count)) * unit * size
    allowed = rounded(error, out, dtype)
    if request.reads_c and request.out is not None and request.out.ptr == request.c.ptr:
        allowed = np.where(gap_mask(form, block_offsets(form, dtype)), np.inf, allowed)
    return {"out": allowed}


def numpy_block_sparse(request: Any, executor: object, row: Row) -> NumpyPlan:
    """A plan that computes with NumPy: in f64 where the operands are f64 or c128, else in f32."""
    del executor
    return NumpyPlan(row, block_sparse_evaluate, work_of(request.a.dtype))
