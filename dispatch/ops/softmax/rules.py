"""What a softmax row asks of a request beyond its dtypes: a layout that a descriptor of cuDNN can say.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.cudnn.axes import Axis, describable, merge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.ops.softmax.request import SoftmaxBwdRequest, SoftmaxRequest
    from dispatch.tensor import Layout

__all__ = ["axes_of", "four_axes"]

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
