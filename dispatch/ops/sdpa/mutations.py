"""Wrong attention that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.sdpa.reference import evaluate
from dispatch.testing.mutations import altered, neighbour, of_operand, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array
    from dispatch.ops.sdpa.request import SdpaRequest

__all__ = ["MUTATIONS"]


def _axis(request: SdpaRequest, axis: int) -> int:
    """An axis of (B, heads, S, head) in an operand: packed ones are (tokens, heads, head)."""
    return axis if not request.packed else {1: 1, 2: 0, 3: 2}[axis]


def key(request: SdpaRequest) -> Array:
    """The values of one key left out: the first, which every query without a window attends to."""
    values = np.array(request.v)
    np.moveaxis(values, _axis(request, 2), 0)[0] = 0
    return values


def heads(request: SdpaRequest) -> Array | None:
    """Each head with its neighbour's queries."""
    return neighbour(request.q, _axis(request, 1)) if request.scores[1] > 1 else None


def shared_heads(request: SdpaRequest) -> Results | None:
    """Each group of heads with its neighbour's keys and values."""
    axis = _axis(request, 1)
    if request.k.shape[axis] < 2:
        return None
    return altered(evaluate, request, k=neighbour(request.k, axis), v=neighbour(request.v, axis))


def scale(request: SdpaRequest) -> float | None:
    """The scale a tenth too large."""
    return request.factor * 1.1 if request.scores[-1] > 1 else None


def _further(name: str) -> Any:
    """A bound that is one too large."""

    def further(request: SdpaRequest) -> int | None:
        bound: int | None = getattr(request, name)
        return None if bound is None else bound + 1

    return with_fields(evaluate, **{name: further})


def lengths(request: SdpaRequest) -> Array | None:
    """One key of each sequence left out; for fp8, in which one of a hundred does not show, a quarter of them."""
    if request.seq_len_kv is None:
        return None
    values = np.asarray(request.seq_len_kv)
    return np.asarray(values - np.minimum(np.maximum(values // 4, 1) if request.q.dtype.is_fp8 else 1, values))


MUTATIONS = {
    "one key left out": with_fields(evaluate, v=key),
    "heads exchanged": with_fields(evaluate, q=heads),
    "groups of heads exchanged": shared_heads,
    "scale off": with_fields(evaluate, scale=scale),
    "mask off by one on the right": _further("right_bound"),
    "mask off by one on the left": _further("left_bound"),
    "sequences too short": with_fields(evaluate, seq_len_kv=lengths),
    "bias of the key beside": of_operand(evaluate, "bias", partial(neighbour, axis=-1)),
}
