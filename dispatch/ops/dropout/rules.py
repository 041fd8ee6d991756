"""What a dropout row asks of a request beyond its dtypes: tensors that lie in memory as one axis.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import describable, merge

if TYPE_CHECKING:
    from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutRequest

__all__ = ["one_axis"]


def one_axis(request: DropoutRequest | DropoutBwdRequest) -> str:
    """The mask counts elements in memory, so input and output are dense and laid out alike."""
    layouts = [request.layout_of(request.reads[0]), request.layout_of("out")]
    if reason := describable(*layouts):
        return reason
    axes = merge(layouts, [0] * len(layouts[0].shape)) if layouts[0].size else []
    if len(axes) > 1 or any(step != 1 for axis in axes for step in axis.strides):
        return f"needs {request.reads[0]} and out dense and laid out alike, has {layouts[0]} and {layouts[1]}"
    return ""
