"""What an activation row asks of a request beyond its dtypes: layouts that a descriptor of cuDNN can say.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import Axis, alike, describable, merge
from dispatch.ops.activation.request import ActivationMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Layout
    from dispatch.ops.activation.request import ActivationBwdRequest, ActivationRequest

__all__ = ["axes_of", "elu_above_0", "five_axes", "one_layout"]

MAX_AXES = 5


def axes_of(layouts: Sequence[Layout]) -> list[Axis]:
    """The axes of tensors that are gone through element by element, merged."""
    return merge(layouts, [0] * len(layouts[0].shape))


def five_axes(request: ActivationRequest | ActivationBwdRequest) -> str:
    """Strides above 0, and no more than five axes once merged."""
    layouts = [request.layout_of(name) for name in (*request.reads, *request.writes)]
    if reason := describable(*layouts):
        return reason
    count = len(axes_of(layouts))
    return f"needs at most {MAX_AXES} axes that do not merge, has {count}" if count > MAX_AXES else ""


def elu_above_0(request: ActivationBwdRequest) -> str:
    """The gradient of ELU with a coef above 0: cuDNN goes by the sign of y, which is 0 with a coef of 0."""
    if request.mode is not ActivationMode.ELU or request.coef > 0:
        return ""
    return "needs a coef above 0 for the gradient of ELU, has 0: RELU is the same function"


def one_layout(request: ActivationBwdRequest) -> str:
    """The gradient wants all its tensors laid out alike."""
    first = request.x.layout
    for name in ("y", "dy", "out"):
        layout = request.layout_of(name)
        if not alike(first, layout):
            return f"needs {name} with the strides of x {first.strides}, has {layout.strides}"
    return ""
