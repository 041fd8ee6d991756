"""Sparse linear algebra: products with dense vectors and matrices, triangular systems, sparse products, solvers.

cuSPARSE, cuDSS, cuSOLVER and kernels of this library compute them on a GPU, SciPy on the host. A sparse operand of a
request is three tensors and a `SparseForm` (form.py). A `SparseTensor` (tensor.py) contains these and unpacks into
them; it can be made from matrices of SciPy, CuPy and torch (sources.py). The files:

- requests: products, batched, compiled (with semirings), solves, incomplete, sparse_products, vectors, tridiagonal,
  pentadiagonal, ell, sorting, pruning, conversions, bsr_conversions, compression; their algorithms, and rules of rows;
- plans of cuSPARSE: cusparse and the files whose names begin so, tune;
- kernels of this library, and their plans: check (of indices), compression_kernels and own_compression, bsr_kernels and
  own_bsr, block_product_kernels and own_block_product (SpMM of BSR), sampled_kernels and own_sampled (SDDMM),
  product_kernels and own_product (SpMV), semiring_kernels, semiring_tiles and own_compiled (products with the caller's
  operators), plain_operators and own_matrix (SpMM, and batches, by the same kernel);
- iterative solvers: krylov, krylov_kernels and a file for each method, own_krylov (the plan), krylov_reference,
  block_jacobi and own_block_jacobi (inverses of diagonal blocks, and their plan);
- direct solvers: direct, direct_lists, list_rules, cudss and the files whose names begin so, refinement_kernels,
  cusolver, cusolver_refactor, direct_reference;
- reference (results by NumPy and SciPy), patterns and cases (of tests);
- functions, which users know as `dispatch.sparse`.
"""

from __future__ import annotations

from typing import Any

from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function, request_function_of_either
from dispatch.ops.sparse.algorithms import SpgemmAlgorithm, SpmmAlgorithm, SpmvAlgorithm, SpsvAlgorithm
from dispatch.ops.sparse.batched import BatchedSddmmRequest, BatchedSpmmRequest
from dispatch.ops.sparse.block_jacobi import BlockJacobiRequest
from dispatch.ops.sparse.bsr_conversions import Bsr2csrRequest, Csr2bsrNnzRequest, Csr2bsrRequest
from dispatch.ops.sparse.compiled import SpmmOpRequest, SpmvOpRequest
from dispatch.ops.sparse.compression import Coo2csrRequest, Csr2cooRequest, DenseNnzRequest, DenseToSparseRequest
from dispatch.ops.sparse.conversions import Csr2cscRequest, SparseCheckRequest, SparseToDenseRequest
from dispatch.ops.sparse.direct import (
    BatchedSpsolveRequest,
    SparseFactorMemory,
    SparseFactorPrecision,
    SparseKind,
    SpsolveRequest,
)
from dispatch.ops.sparse.direct_lists import BatchedSpsolveListRequest
from dispatch.ops.sparse.ell import BlockedEllMmRequest, SellMvRequest
from dispatch.ops.sparse.form import SparseForm, SparseFormat
from dispatch.ops.sparse.incomplete import Ic0Request, Ilu0Request
from dispatch.ops.sparse.krylov import BicgstabRequest, CgRequest, GmresRequest, MinresRequest, Preconditioner
from dispatch.ops.sparse.pentadiagonal import GpsvRequest
from dispatch.ops.sparse.products import SddmmRequest, SparseMvRequest, SpmmRequest
from dispatch.ops.sparse.pruning import PruneNnzRequest, PruneToCsrRequest
from dispatch.ops.sparse.semirings import Semiring, SparseOperator
from dispatch.ops.sparse.solves import SpsmRequest, SpsvRequest
from dispatch.ops.sparse.sorting import SparseSortRequest
from dispatch.ops.sparse.sparse_products import SpgemmNnzRequest, SpgemmRequest
from dispatch.ops.sparse.tridiagonal import GtsvRequest
from dispatch.ops.sparse.vectors import (
    GatherRequest,
    ScatterRequest,
    SparseAxpbyRequest,
    SparseRotRequest,
    SpvvRequest,
)

__all__ = ["SparseForm", "SparseFormat"]
__all__ += ["BatchedSddmmRequest", "BatchedSpmmRequest", "sddmm_batched", "spmm_batched"]
__all__ += ["BlockJacobiRequest", "Ic0Request", "Ilu0Request", "block_jacobi", "ic0", "ilu0"]
__all__ += ["GpsvRequest", "GtsvRequest", "gpsv", "gtsv"]
__all__ += ["PruneNnzRequest", "PruneToCsrRequest", "prune_nnz", "prune_to_csr"]
__all__ += ["SparseSortRequest", "sparse_sort"]
__all__ += ["BlockedEllMmRequest", "SellMvRequest", "blocked_ell_mm", "sell_mv"]
__all__ += ["BicgstabRequest", "CgRequest", "GmresRequest", "MinresRequest", "Preconditioner"]
__all__ += ["SparseFactorMemory", "SparseFactorPrecision", "SparseKind", "SpsolveRequest", "spsolve"]
__all__ += ["BatchedSpsolveListRequest", "BatchedSpsolveRequest", "spsolve_batched"]
__all__ += ["bicgstab", "cg", "gmres", "minres"]
__all__ += ["GatherRequest", "ScatterRequest", "SparseAxpbyRequest", "SparseRotRequest", "SpvvRequest"]
__all__ += ["sparse_axpby", "sparse_gather", "sparse_rot", "sparse_scatter", "spvv"]
__all__ += ["Semiring", "SparseOperator", "SpmmOpRequest", "SpmvOpRequest", "spmm_op", "spmv_op"]
__all__ += ["SpgemmAlgorithm", "SpmmAlgorithm", "SpmvAlgorithm", "SpsvAlgorithm"]
__all__ += ["Csr2cscRequest", "SddmmRequest", "SparseCheckRequest", "SparseMvRequest", "SparseToDenseRequest"]
__all__ += ["SpgemmNnzRequest", "SpgemmRequest", "SpmmRequest", "SpsmRequest", "SpsvRequest"]
__all__ += ["Coo2csrRequest", "Csr2cooRequest", "DenseNnzRequest", "DenseToSparseRequest"]
__all__ += ["coo2csr", "csr2coo", "dense_nnz", "dense_to_sparse"]
__all__ += ["Bsr2csrRequest", "Csr2bsrNnzRequest", "Csr2bsrRequest", "bsr2csr", "csr2bsr", "csr2bsr_nnz"]
__all__ += ["csr2csc", "sddmm", "sparse_check", "sparse_mv", "sparse_to_dense"]
__all__ += ["spgemm", "spgemm_nnz", "spmm", "spsm", "spsv"]

ell_plan = plan_call("ell_plan", "dispatch.ops.sparse.cusparse_ell", "A plan of a product in sliced or blocked ELL.")
pruning_plan = plan_call("pruning_plan", "dispatch.ops.sparse.cusparse_pruning", "A plan of cuSPARSE's pruneDense2csr.")
sorting_plan = plan_call("sorting_plan", "dispatch.ops.sparse.cusparse_sorting", "A plan of one of cuSPARSE's sorts.")
compiled_plan = plan_call(
    "compiled_plan", "dispatch.ops.sparse.cusparse_compiled", "A plan of a product with the caller's operators."
)
batched_plan = plan_call("batched_plan", "dispatch.ops.sparse.cusparse_batched", "A plan of a batch of products.")
incomplete_plan = plan_call(
    "incomplete_plan", "dispatch.ops.sparse.cusparse_incomplete", "A plan of cuSPARSE's ILU(0) or IC(0)."
)
gpsv_plan = plan_call("gpsv_plan", "dispatch.ops.sparse.cusparse_pentadiagonal", "A plan of cuSPARSE's gpsv.")
gtsv_plan = plan_call("gtsv_plan", "dispatch.ops.sparse.cusparse_tridiagonal", "A plan of cuSPARSE's gtsv2.")
vectors_plan = plan_call(
    "vectors_plan", "dispatch.ops.sparse.cusparse_vectors", "A plan of one of cuSPARSE's calls over a sparse vector."
)
block_jacobi_plan = plan_call(
    "block_jacobi_plan", "dispatch.ops.sparse.own_block_jacobi", "A plan of the inverses of a matrix's blocks."
)
krylov_plan = plan_call("krylov_plan", "dispatch.ops.sparse.own_krylov", "A plan of an iteration: one graph.")
cudss_plan = plan_call("cudss_plan", "dispatch.ops.sparse.cudss", "A plan of a direct solve by cuDSS.")
cusolver_plan = plan_call("cusolver_plan", "dispatch.ops.sparse.cusolver", "A plan of a direct solve by cuSOLVER.")
refactor_plan = plan_call(
    "refactor_plan", "dispatch.ops.sparse.cusolver_refactor", "A plan of cuSOLVER's refactorization."
)
own_block_product_plan = plan_call(
    "own_block_product_plan",
    "dispatch.ops.sparse.own_block_product",
    "A plan of a matrix of blocks times a dense one by one kernel.",
)
own_bsr_plan = plan_call("own_bsr_plan", "dispatch.ops.sparse.own_bsr", "A plan between CSR, BSR and dense matrices.")
own_compiled_plan = plan_call(
    "own_compiled_plan",
    "dispatch.ops.sparse.own_compiled",
    "A plan of a product with a caller's operators by one kernel.",
)
own_compression_plan = plan_call(
    "own_compression_plan", "dispatch.ops.sparse.own_compression", "A plan that makes a dense matrix sparse."
)
own_matrix_plan = plan_call(
    "own_matrix_plan", "dispatch.ops.sparse.own_matrix", "A plan of a matrix times a dense one by one kernel."
)
own_product_plan = plan_call(
    "own_product_plan", "dispatch.ops.sparse.own_product", "A plan of a matrix times a vector by one kernel."
)
own_sampled_plan = plan_call(
    "own_sampled_plan", "dispatch.ops.sparse.own_sampled", "A plan of elements of a dense product by one kernel."
)
cusparse_plan = plan_call("cusparse_plan", "dispatch.ops.sparse.cusparse", "A plan of cuSPARSE's calls.")

compression_plan = plan_call(
    "compression_plan",
    "dispatch.ops.sparse.cusparse_compression",
    "A plan that converts offsets to indices by cuSPARSE, or the reverse.",
)

sparse_mv, spmm = request_function(SparseMvRequest, "sparse_mv"), request_function(SpmmRequest, "spmm")
spmm_batched = request_function(BatchedSpmmRequest, "spmm_batched")
sddmm_batched = request_function(BatchedSddmmRequest, "sddmm_batched")
sddmm = request_function(SddmmRequest, "sddmm")
spsv, spsm = request_function(SpsvRequest, "spsv"), request_function(SpsmRequest, "spsm")
spgemm, spgemm_nnz = request_function(SpgemmRequest, "spgemm"), request_function(SpgemmNnzRequest, "spgemm_nnz")
sparse_to_dense = request_function(SparseToDenseRequest, "sparse_to_dense")
csr2csc = request_function(Csr2cscRequest, "csr2csc")
sparse_check = request_function(SparseCheckRequest, "sparse_check")
dense_nnz = request_function(DenseNnzRequest, "dense_nnz")
dense_to_sparse = request_function(DenseToSparseRequest, "dense_to_sparse")
coo2csr, csr2coo = request_function(Coo2csrRequest, "coo2csr"), request_function(Csr2cooRequest, "csr2coo")
csr2bsr, bsr2csr = request_function(Csr2bsrRequest, "csr2bsr"), request_function(Bsr2csrRequest, "bsr2csr")
csr2bsr_nnz = request_function(Csr2bsrNnzRequest, "csr2bsr_nnz")
sparse_gather, sparse_scatter = (
    request_function(GatherRequest, "sparse_gather"),
    request_function(ScatterRequest, "sparse_scatter"),
)
sparse_rot = request_function(SparseRotRequest, "sparse_rot")
spmm_op, spmv_op = request_function(SpmmOpRequest, "spmm_op"), request_function(SpmvOpRequest, "spmv_op")
sparse_axpby, spvv = request_function(SparseAxpbyRequest, "sparse_axpby"), request_function(SpvvRequest, "spvv")
ilu0, ic0 = request_function(Ilu0Request, "ilu0"), request_function(Ic0Request, "ic0")
block_jacobi = request_function(BlockJacobiRequest, "block_jacobi")
gpsv = request_function(GpsvRequest, "gpsv")
prune_nnz = request_function(PruneNnzRequest, "prune_nnz")
prune_to_csr = request_function(PruneToCsrRequest, "prune_to_csr")
sparse_sort = request_function(SparseSortRequest, "sparse_sort")
sell_mv = request_function(SellMvRequest, "sell_mv")
blocked_ell_mm = request_function(BlockedEllMmRequest, "blocked_ell_mm")
gtsv, spsolve = request_function(GtsvRequest, "gtsv"), request_function(SpsolveRequest, "spsolve")
_of_one_pattern: Any = request_function(BatchedSpsolveRequest, "spsolve_batched")
_of_lists: Any = request_function(BatchedSpsolveListRequest, "spsolve_batched")


def _spsolve_batched(values: Any, *more: Any, **named: Any) -> Any:
    """Run the request for lists of matrices, or the one for the values of one pattern."""
    function = _of_lists if isinstance(values, (list, tuple)) else _of_one_pattern
    return function(values, *more, **named)


spsolve_batched = request_function_of_either(
    BatchedSpsolveRequest, BatchedSpsolveListRequest, "spsolve_batched", _spsolve_batched
)
cg, bicgstab = request_function(CgRequest, "cg"), request_function(BicgstabRequest, "bicgstab")
gmres, minres = request_function(GmresRequest, "gmres"), request_function(MinresRequest, "minres")
