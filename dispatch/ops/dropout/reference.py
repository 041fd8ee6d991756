"""What the dropout requests mean, in NumPy, with masks by Philox, whose key is the seed and whose counter the pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, Results, draw, values
from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutStatesRequest, reserve_bytes

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.dropout.request import DropoutRequest

__all__ = ["evaluate", "mask_of", "reference"]


def evaluate(request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, computed in a working dtype; those of the forward pass hold the state, too."""
    if isinstance(request, DropoutStatesRequest):
        return {"out": np.array([request.seed, 0], np.uint64).view(np.uint8)}
    if isinstance(request, DropoutBwdRequest):
        kept = mask_of(np.asarray(request.reserve), request.dy.size).reshape(request.dy.shape)
        return {"out": np.where(kept, values(request.dy, work) * _scale(request.p, work), work.type(0))}
    return _forward(request, work)


def _forward(request: DropoutRequest, work: np.dtype[Any]) -> Results:
    kept, states = draw(np.asarray(request.states), request.x.size, request.p)
    reserve = np.zeros(reserve_bytes(request.x.size), np.uint8)
    bits = np.packbits(kept, bitorder="little")
    reserve[: len(bits)] = bits
    x = values(request.x, work)
    y = np.where(kept.reshape(x.shape), x * _scale(request.p, work), work.type(0))
    return {"out": y, "reserve": reserve, "states": states}


def mask_of(reserve: Array, size: int) -> Array:
    """Which elements a pass of the host kept."""
    return np.unpackbits(reserve, count=size, bitorder="little").astype(np.bool_)


def _scale(p: float, work: np.dtype[Any]) -> Any:
    return work.type(1 / (1 - p))


def reference(request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest) -> Results:
    """The outputs of a request of the host in float64, by name."""
    return evaluate(request, EXACT)
