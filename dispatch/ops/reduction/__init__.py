"""Reductions over any axes: sums, products, extremes with their places, norms: `reduce`.

`ReduceRequest` is the request; `cudnn_reduce`, `cudnn_sums` and `numpy_reduce` carry it out, `reference` says what is
right, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.reduction.request import ReduceOp, ReduceRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = ["ReduceOp", "ReduceRequest", "cudnn_reduce", "cudnn_sums", "numpy_reduce", "reduce"]

ADD = ReduceOp.ADD


def reduce(
    x: Tensor,
    axes: int | tuple[int, ...] | None = None,
    *,
    op: ReduceOp = ADD,
    keepdims: bool = False,
    indices: bool = False,
    out_dtype: Any = None,
    out: Tensor | None = None,
    index: Tensor | None = None,
) -> Any:
    """x reduced over some axes (None: all), on the current stream; returns without waiting.

    Gives a tensor of x's shape without those axes (with `keepdims`: with one element there), or with `indices` a pair
    of it and the u32 places of the elements that MIN, MAX or AMAX chose. Raises BadRequest for axes that x has not,
    NoRow where no library takes the tensors.
    """
    return run(ReduceRequest(x, axes, op, keepdims, indices, out_dtype, out, index))


def cudnn_reduce(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnReduceTensor`."""
    from dispatch.ops.reduction import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def cudnn_sums(request: ReduceRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.reduction import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan_sums(request, executor, row)


def numpy_reduce(request: ReduceRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.reduction.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
