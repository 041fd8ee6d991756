"""Reductions over any axes: sums, products, extremes with their places, norms: `reduce`.

`ReduceRequest` is the request; `cudnn_reduce`, `cudnn_sums` and `numpy_reduce` carry it out, `reference` says what is
right, `cases` what is tested.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.reduction.request import ReduceOp, ReduceRequest
from dispatch.request import run

if TYPE_CHECKING:
    from dispatch.cudnn.formulas import Results
    from dispatch.lane import CudaLane, Lane
    from dispatch.ops.reduction.trials import ReduceCase
    from dispatch.request import Plan
    from dispatch.row import Row
    from dispatch.tensor import Tensor

__all__ = ["ReduceOp", "ReduceRequest", "cases", "cudnn_reduce", "cudnn_sums", "numpy_reduce", "reduce", "reference"]

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


def cudnn_reduce(request: ReduceRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in `cudnnReduceTensor`."""
    from dispatch.ops.reduction import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, lane, row)


def cudnn_sums(request: ReduceRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.reduction import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan_sums(request, lane, row)


def numpy_reduce(request: ReduceRequest, lane: Lane, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.cudnn.formulas import numpy_plan
    from dispatch.ops.reduction.formulas import evaluate

    return numpy_plan(evaluate, request, lane, row)


def reference(request: ReduceRequest) -> Results:
    """The outputs of a request in float64, by name."""
    from dispatch.cudnn.formulas import EXACT
    from dispatch.ops.reduction.formulas import evaluate

    return evaluate(request, EXACT)


def cases(row: Row) -> list[ReduceCase]:
    """The cases that a row of the table is tried with."""
    from dispatch.ops.reduction import trials

    return trials.cases(row)
