"""Block-sparse contractions as cuTENSOR operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request import IdlePlan
from dispatch.libraries.cutensor.block_sparse import BlockSparseOperand, BlockSparsePlan, ZeroPlan
from dispatch.ops.contraction.block_sparse import block_offsets, has_gaps

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.contraction.block_sparse_request import ContractBlockSparseRequest

__all__ = ["plan"]


def plan(request: ContractBlockSparseRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused where cuTENSOR has no kernel for it."""
    out = request.layout_of("out")
    if not out.size:
        return IdlePlan(row)
    if not (request.a_form.blocks and request.b_form.blocks):
        return ZeroPlan(executor, row, request.place_of("out"), out.high - out.low)

    def operand(name: str) -> BlockSparseOperand:
        form = request.form_of(name)
        offsets = block_offsets(form, request.a.dtype)[:-1]
        return BlockSparseOperand(request.place_of(name), request.modes_of(name), form.sections, form.blocks, offsets)

    added = operand("c" if request.reads_added else "out")  # a factor of 0 means that it is not read
    operands = (operand("a"), operand("b"), added, operand("out"))
    zeroed = out.high - out.low if has_gaps(request.d_form, request.a.dtype) else 0
    return BlockSparsePlan(executor, row, operands, request.a.dtype, reproducible=request.reproducible, zeroed=zeroed)
