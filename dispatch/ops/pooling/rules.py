"""What a pooling row asks of a request beyond its dtypes: layouts that a descriptor of cuDNN can say.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import alike, describable

if TYPE_CHECKING:
    from dispatch.ops.pooling.request import PoolingBwdRequest, PoolingRequest

__all__ = ["images", "pairs", "whole_max"]


def whole_max(request: PoolingRequest) -> str:
    """The averages of i8 are whole numbers, and no document says how they are rounded."""
    return "" if request.mode.is_max else f"needs a mode of MAX or MAX_DETERMINISTIC for i8, has {request.mode.name}"


def images(request: PoolingRequest | PoolingBwdRequest) -> str:
    """Strides above 0."""
    return describable(*(request.layout_of(name) for name in (*request.reads, *request.writes)))


def pairs(request: PoolingBwdRequest) -> str:
    """The gradient of x laid out as x is, and that of y as y is."""
    for name, other in (("dy", "y"), ("out", "x")):
        one, wanted = request.layout_of(name), request.layout_of(other)
        if not alike(one, wanted):
            return f"needs {name} with the strides of {other} {wanted}, has {one}"
    return ""
