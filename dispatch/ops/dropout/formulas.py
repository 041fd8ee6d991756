"""What the dropout requests mean, in NumPy, with masks by Philox, whose key is the seed and whose counter the pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.cudnn.formulas import Results, values
from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutStatesRequest, reserve_bytes

if TYPE_CHECKING:
    from dispatch.ops.dropout.request import DropoutRequest
    from dispatch.tensor import Array

__all__ = ["draw", "evaluate", "mask_of"]


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


def draw(states: Array, size: int, p: float) -> tuple[Array, Array]:
    """Which of so many elements stay, each with probability 1 - p, and the state behind that."""
    seed, passes = states.view(np.uint64)
    random = np.random.Generator(np.random.Philox(key=int(seed), counter=int(passes) << 64))
    return random.random(size) >= p, np.array([seed, passes + 1], np.uint64).view(np.uint8)


def mask_of(reserve: Array, size: int) -> Array:
    """Which elements a pass of the host kept."""
    return np.unpackbits(reserve, count=size, bitorder="little").astype(np.bool_)


def _scale(p: float, work: np.dtype[Any]) -> Any:
    return work.type(1 / (1 - p))
