"""What a row of normalization requires of a request beyond its dtypes: layouts and channels of cuDNN's engines.

Each rule returns the reason for a refusal in the words "needs …, has …", or "" if it is met. The rules follow the
engine heuristics of cuDNN 9.19 for sm_90.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import alike
from dispatch.core.layouts import lies_dense
from dispatch.keys import member
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest, NormMode

if TYPE_CHECKING:
    from dispatch.ops.norm.request import NormRequest

__all__ = [
    "bias_by_channel",
    "channels_by_16_bytes",
    "dense_order",
    "grouped",
    "instance_first",
    "last_by_running",
    "ungrouped",
]


def dense_order(request: NormRequest) -> str:
    """Every operand of x's shape is dense: in C order, or for images also with channels last."""
    for name in ("x", "dy", "out", "dx"):
        if name not in (*request.reads, *request.writes):
            continue
        layout = request.layout_of(name)
        if layout.is_contiguous or (request.by_channel and lies_dense(layout, last=True)):
            if not request.by_channel or alike(layout, request.x.layout):
                continue
            return f"needs {name} with its axes in the memory order of x, has {layout}"
        return f"needs {name} dense, has {layout}: copy it with dev.array(x)"
    return ""


def channels_by_16_bytes(request: NormRequest) -> str:
    """Batch norm with the batch's own statistics: the channels are a multiple of 16 bytes."""
    running = isinstance(request, NormFwdRequest) and request.by_running
    multiple = 16 // request.x.dtype.itemsize
    if request.mode is not NormMode.BATCH_NORM or running or request.x.shape[1] % multiple == 0:
        return ""
    return f"needs a multiple of {multiple} channels for BATCH_NORM of {request.x.dtype}, has {request.x.shape[1]}"


def instance_first(request: NormBwdRequest) -> str:
    """The gradient of instance norm: channels first (seen on an H200: with channels last dscale comes out as 0)."""
    if request.mode is not NormMode.INSTANCE_NORM or request.x.layout.is_contiguous:
        return ""
    return f"needs x in C order for the gradient of INSTANCE_NORM, has {request.x.layout}"


def last_by_running(request: NormFwdRequest) -> str:
    """Batch norm with given statistics: channels last, if there are spatial axes."""
    if not request.by_running or request.x.ndim == 2 or lies_dense(request.x.layout, last=True):
        return ""
    return f"needs x with channels last for BATCH_NORM without training, has {request.x.layout}"


def bias_by_channel(request: NormFwdRequest) -> str:
    """Batch norm with the batch's own statistics, and instance norm, need a bias."""
    if request.bias is not None or not request.by_channel or request.by_running:
        return ""
    return f"needs a bias for {member(request.mode).name}, has none: pass zeros"


def ungrouped(request: NormRequest) -> str:
    """All modes but GROUP_NORM, which has a row of its own."""
    return "needs a mode without groups, has GROUP_NORM" if request.by_group else ""


def grouped(request: NormRequest) -> str:
    """GROUP_NORM, with channels first: instance norm's engines need the channels of a group next to each other."""
    if not request.by_group:
        return f"needs GROUP_NORM, has {member(request.mode).name}"
    return "" if request.x.layout.is_contiguous else f"needs x in C order for GROUP_NORM, has {request.x.layout}"
