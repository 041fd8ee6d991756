"""The rows of block-sparse contractions by cuTENSOR, from version 2.3 on.

`run_on` names the machines on which all cases of a row have passed; it is empty where no machine has run them yet. The
dtypes are those that https://docs.nvidia.com/cuda/cutensor/latest/api/cutensor.html lists.
"""

# fmt: off
from __future__ import annotations

from dispatch.core.nonfinite import stated
from dispatch.core.row import Row
from dispatch.keys import C64, C128, F32, F64, Arch, Compute
from dispatch.ops.contraction import cutensor_block_sparse
from dispatch.ops.contraction.block_sparse_reference import numpy_block_sparse
from dispatch.ops.contraction.block_sparse_rules import aligned_blocks, blocks_to_add, few_axes
from dispatch.table.on_host import on_host

__all__ = ["ROWS"]

SM75, V23 = Arch(75), (2, 3)
COMP_32F, COMP_64F = Compute.COMPUTE_32F, Compute.COMPUTE_64F
RULES = (few_axes, aligned_blocks, blocks_to_add)
CALL = ("cutensor", "cutensorBlockSparseContract", cutensor_block_sparse, ("H100",))

GPU_ROWS = (
#       op                       operands, result    compute   rules  min_arch, max_arch, min_version, calls
    Row("contract_block_sparse", (F32, F32, F32),    COMP_32F, RULES, SM75, None, V23, *CALL),
    Row("contract_block_sparse", (F64, F64, F64),    COMP_64F, RULES, SM75, None, V23, *CALL),
    Row("contract_block_sparse", (C64, C64, C64),    COMP_32F, RULES, SM75, None, V23, *CALL),
    Row("contract_block_sparse", (C128, C128, C128), COMP_64F, RULES, SM75, None, V23, *CALL),
)
# fmt: on
HOST_ROWS = (on_host(row, numpy_block_sparse, function="einsum", stands_for="cutensor") for row in GPU_ROWS)
ROWS = stated((*GPU_ROWS, *HOST_ROWS))
