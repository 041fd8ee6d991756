"""What a reduction row asks of a request beyond its dtypes: axes that a descriptor of cuDNN can say.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import Axis, describable, merge
from dispatch.ops.reduction.request import ReduceOp

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.ops.reduction.request import ReduceRequest

__all__ = ["axes_of", "eight_axes", "lines", "partial", "shrinks", "sums"]

MAX_AXES = 8
SUMS = (ReduceOp.ADD, ReduceOp.AVG, ReduceOp.NORM1)


def axes_of(request: ReduceRequest) -> list[Axis]:
    """The axes of x, those that are reduced in group 1, merged; with the strides of x and of the outputs.

    With indices they keep their order, which the indices count in.
    """
    x = request.x.layout
    layouts = [x, *(_widened(request, request.layout_of(name)) for name in request.made())]
    groups = [int(axis in request.reduced) for axis in range(len(x.shape))]
    return merge(layouts, groups, in_order=request.indices)


def _widened(request: ReduceRequest, layout: Layout) -> Layout:
    """The layout of an output with the axes of x, of one element where they are reduced."""
    if request.keepdims:
        return layout
    extents, steps = list(layout.shape), list(layout.strides)
    for axis in request.reduced:
        extents.insert(axis, 1)
        steps.insert(axis, 1)
    return request.device.layout(layout.dtype, tuple(extents), tuple(steps), layout.alignment)


def shrinks(request: ReduceRequest) -> str:
    """cuDNN refuses a result of the operand's own shape (BAD_PARAM, "!dims_differ")."""
    if any(request.x.shape[axis] > 1 for axis in request.reduced) or request.x.size == 0:
        return ""
    return (
        f"needs an axis of two elements or more among those reduced, has x {request.x.layout}, axes {request.reduced}"
    )


def eight_axes(request: ReduceRequest) -> str:
    """Strides above 0, and no more than eight axes once merged; places in a dense tensor of their own."""
    layouts = {name: request.layout_of(name) for name in ("x", *request.made())}
    if reason := describable(*layouts.values()):
        return reason
    count = len(axes_of(request))
    if count > MAX_AXES:
        return f"needs at most {MAX_AXES} axes that do not merge, has {count}"
    if request.indices and not (layouts["index"].is_contiguous and layouts["out"].is_contiguous):
        return "needs out and index dense in row-major order, has other strides"
    return ""


def sums(request: ReduceRequest) -> str:
    """What adds up: ADD, AVG and NORM1. A graph's extremes are left out, for none says what becomes of a NaN."""
    if request.reduce in SUMS:
        return ""
    return f"needs {', '.join(op.name for op in SUMS)}, has {request.reduce.name}"


def lines(request: ReduceRequest) -> str:
    """x dense, and the axes that are reduced, once merged, its innermost ones, its outermost ones, or all."""
    if reason := describable(request.layout_of("x"), request.layout_of("out")):
        return reason
    axes = axes_of(request)
    dense, step = True, 1
    for axis in reversed(axes):
        dense, step = dense and axis.strides[0] == step, step * axis.extent
    if not dense or not 1 <= len(axes) <= 2 or any(axis.strides[1] != 1 for axis in axes if not axis.group):
        return f"needs the rows or the columns of a dense matrix, has x {request.x.layout}, axes {request.reduced}"
    return ""


def partial(request: ReduceRequest) -> str:
    """Some axis is kept: to one number, cudnnReduceTensor is as fast as any."""
    return "" if request.layout_of("out").size > 1 else "needs two sums or more, has one"
