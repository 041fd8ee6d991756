"""Grouped products by one kernel: rows of one matrix in groups, or products of any extents.

`grouped_matmul` is the request function, `GroupedMatmulRequest` and `GroupedMatmulListRequest` are the requests;
`cutlass_plan`, `cublaslt_plan`, `cublas_plan` and `numpy_plan` make their plans, reference.py computes the expected
results. The files: base, request and request_lists (fields and checks), rules, config, plans, cutlass, cublaslt and
cublas (on a GPU), reference, cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.list_call_cache import ListCallCache
from dispatch.core.request_function import request_function_of_either
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.ops.grouped_matmul.request import GroupedMatmulRequest
from dispatch.ops.grouped_matmul.request_lists import GroupedMatmulListRequest
from dispatch.unknown_arguments import refuse_arguments

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

    Requests = GroupedMatmulRequest | GroupedMatmulListRequest

__all__ = [
    "GroupedMatmulRequest",
    "grouped_matmul",
]


def cutlass_plan(request: Requests, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that launches a grouped CUTLASS kernel, which is compiled unless it is cached."""
    from dispatch.ops.grouped_matmul import cutlass  # at first use: importing `dispatch` looks for no headers

    return cutlass.plan(request, executor, row)


def cublaslt_plan(request: Requests, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `cublasLtMatmul` with grouped layouts."""
    from dispatch.ops.grouped_matmul import cublaslt  # at first use, as above

    return cublaslt.plan(request, executor, row)


def cublas_plan(request: GroupedMatmulListRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that calls `cublasGemmGroupedBatchedEx`; Refused if NVRTC is missing."""
    from dispatch.ops.grouped_matmul import cublas  # at first use, as above

    return cublas.plan(request, executor, row)


def numpy_plan(request: Requests, _executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy, group by group."""
    from dispatch.ops.grouped_matmul import reference as host

    return host.plan(request, row)


CHOICES = ("epilogue", "alpha", "out_dtype", "fast_accum", "config", "autotune", "library", "compute")
_rows_call_cache = ListCallCache(GroupedMatmulRequest, names=("a", "b", "ends", "out", *CHOICES))
_lists_call_cache = ListCallCache(GroupedMatmulListRequest, names=("a", "b", "out", *CHOICES))


def _grouped_matmul(
    a: Any,
    b: Any,
    ends: Any = None,
    *more: Any,
    out: Any = None,
    epilogue: Any = None,
    alpha: Any = 1.0,
    out_dtype: Any = None,
    fast_accum: Any = False,
    config: Any = None,
    autotune: Any = False,
    library: Any = None,
    compute: Any = None,
    **unknown: Any,
) -> Any:
    """Run the request for the operands: GroupedMatmulRequest for tensors, GroupedMatmulListRequest for sequences."""
    if unknown or more:
        refuse_arguments("grouped_matmul", GroupedMatmulRequest, more, unknown)
    choices = (epilogue, alpha, out_dtype, fast_accum, config, autotune, library, compute)
    if isinstance(a, Tensor) or framework_of(type(a)) is not None:
        return _rows_call_cache(a, b, ends, out, *choices)
    if ends is not None or isinstance(b, Tensor) or isinstance(out, Tensor):
        raise BadRequest("a", f"a {type(a).__name__}", "a tensor, or sequences for a, b and out without ends")
    return _lists_call_cache(a, b, out, *choices)


grouped_matmul = request_function_of_either(
    GroupedMatmulRequest, GroupedMatmulListRequest, "grouped_matmul", _grouped_matmul
)
