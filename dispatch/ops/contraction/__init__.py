"""Tensor contractions, reductions over modes, permutations and elementwise operations as in cuTENSOR; einsum.

cuTENSOR computes them; cuBLASLt contractions that are matrix products, a kernel of this library networks of small
tensors, and NumPy all of them on the host. The files: base, request and elementwise (the requests), choices, modes (the
letters of axes), rules, cutensor, cublaslt and permuted (the plans), product (which contractions are matrix products),
tune, reference (the expected results), bounds (error bounds), cases. For einsum: einsum (the request), paths, steps,
sequence (the plan), einsum_reference; network, network_kernel, network_cost, network_rules and own_network run all
steps in one launch; functions has functions with NumPy's signatures. For block-sparse contractions: block_sparse (the
layout of the blocks), block_sparse_tensor, and block_sparse_* files with the names above.
"""

from __future__ import annotations

from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.contraction.block_sparse import BlockSparseForm
from dispatch.ops.contraction.block_sparse_request import ContractBlockSparseRequest
from dispatch.ops.contraction.block_sparse_tensor import BlockSparseTensor
from dispatch.ops.contraction.choices import ContractionAlgo, TensorOp
from dispatch.ops.contraction.einsum import EinsumRequest
from dispatch.ops.contraction.einsum_call import einsum
from dispatch.ops.contraction.elementwise import ElementwiseBinaryRequest, ElementwiseTrinaryRequest, PermuteRequest
from dispatch.ops.contraction.request import ContractRequest, ContractTrinaryRequest, ReduceModesRequest

__all__ = [
    "BlockSparseForm",
    "BlockSparseTensor",
    "ContractBlockSparseRequest",
    "ContractRequest",
    "ContractTrinaryRequest",
    "ContractionAlgo",
    "EinsumRequest",
    "ElementwiseBinaryRequest",
    "ElementwiseTrinaryRequest",
    "PermuteRequest",
    "ReduceModesRequest",
    "TensorOp",
    "contract",
    "contract_block_sparse",
    "contract_trinary",
    "einsum",
    "elementwise_binary",
    "elementwise_trinary",
    "permute",
    "reduce_modes",
]

cutensor_modes = plan_call(
    "cutensor_modes",
    "dispatch.ops.contraction.cutensor",
    "A plan of cuTENSOR's; Refused where it has no kernel for the operation.",
)
cutensor_block_sparse = plan_call(
    "cutensor_block_sparse",
    "dispatch.ops.contraction.block_sparse_cutensor",
    "A plan of `cutensorBlockSparseContract`; Refused where cuTENSOR has no kernel for it.",
)
cublaslt_contract = plan_call(
    "cublaslt_contract",
    "dispatch.ops.contraction.cublaslt",
    "A plan of `cublasLtMatmul`, the product that a contraction is; Refused where that has no algorithm for it.",
)
permuted_contract = plan_call(
    "permuted_contract",
    "dispatch.ops.contraction.permuted",
    "A plan of permutations around one `cublasLtMatmul`; Refused where a row is missing for one of them.",
)
sequence_einsum = plan_call(
    "sequence_einsum",
    "dispatch.ops.contraction.sequence",
    "A plan of one for each step, of which the table chooses the rows; Refused where it has none for one of them.",
)
network_einsum = plan_call(
    "network_einsum",
    "dispatch.ops.contraction.own_network",
    "A plan of one launch for all steps of small tensors; Refused without NVRTC.",
)
contract = request_function(ContractRequest, "contract")
contract_block_sparse = request_function(ContractBlockSparseRequest, "contract_block_sparse")
contract_trinary = request_function(ContractTrinaryRequest, "contract_trinary")
reduce_modes = request_function(ReduceModesRequest, "reduce_modes")
permute = request_function(PermuteRequest, "permute")
elementwise_binary = request_function(ElementwiseBinaryRequest, "elementwise_binary")
elementwise_trinary = request_function(ElementwiseTrinaryRequest, "elementwise_trinary")
