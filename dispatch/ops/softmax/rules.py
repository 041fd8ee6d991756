"""What a softmax row asks of a request beyond its dtypes: a layout that a descriptor of cuDNN can say.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import Axis, alike, describable, gapless, merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Layout
    from dispatch.ops.softmax.request import SoftmaxBwdRequest, SoftmaxRequest

__all__ = ["axes_of", "four_axes", "one_dense_layout"]

MAX_OTHERS = 4  # images and three axes of space


def axes_of(layouts: Sequence[Layout], axis: int) -> tuple[Axis, list[Axis]]:
    """The axis that sums to 1, and the others, merged."""
    rank = len(layouts[0].shape)
    axes = merge(layouts, [place == axis % rank for place in range(rank)])
    summed = next((found for found in axes if found.group), Axis(1, (1,) * len(layouts), True))
    return summed, [found for found in axes if not found.group]


def four_axes(request: SoftmaxRequest | SoftmaxBwdRequest) -> str:
    """Strides above 0, and no more than four axes beside the one that sums to 1, once merged."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    if reason := describable(*layouts):
        return reason
    _, others = axes_of(layouts, request.axis)
    if len(others) > MAX_OTHERS:
        return f"needs at most {MAX_OTHERS} axes beside axis {request.axis} that do not merge, has {len(others)}"
    return ""


def one_dense_layout(request: SoftmaxRequest | SoftmaxBwdRequest) -> str:
    """All operands without gaps and laid out alike, their axes in any order.

    cuDNN takes others and goes by the strides of one of them, or by none (seen on an H200, 9.19: wrong numbers).
    """
    first, *others = (*request.reads, *request.writes)
    layout = request.layout_of(first)
    for name in others:
        if not alike(layout, request.layout_of(name)):
            return f"needs {name} with the strides of {first} {layout}, has {request.layout_of(name)}"
    return "" if gapless(layout) else f"needs {first} without gaps, has {layout}: copy it with dev.array(x.numpy())"
