"""Wrong attention that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sdpa.reference import evaluate
from dispatch.testing.mutations import changed

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.sdpa.request import SdpaRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS"]


def _wrong(request: SdpaRequest, **fields: Any) -> Results:
    with np.errstate(all="ignore"):
        wrong: Any = replace(request, **fields)
        return evaluate(wrong, EXACT)


def _axis(request: SdpaRequest, axis: int) -> int:
    """An axis of (B, heads, S, head) in an operand: packed ones are (tokens, heads, head)."""
    return axis if not request.packed else {1: 1, 2: 0, 3: 2}[axis]


def key(request: SdpaRequest) -> Results | None:
    """The values of one key left out: the first, which every query sees that has no window."""
    values = np.asarray(request.v).copy()
    np.moveaxis(values, _axis(request, 2), 0)[0] = 0
    return _wrong(request, v=changed(request.v, values))


def heads(request: SdpaRequest) -> Results | None:
    """Each head with its neighbour's queries."""
    if request.scores[1] < 2:
        return None
    return _wrong(request, q=changed(request.q, np.roll(np.asarray(request.q), 1, axis=_axis(request, 1))))


def shared_heads(request: SdpaRequest) -> Results | None:
    """Each group of heads with its neighbour's keys and values."""
    if request.k.shape[_axis(request, 1)] < 2:
        return None
    rolled = {n: np.roll(np.asarray(getattr(request, n)), 1, axis=_axis(request, 1)) for n in "kv"}
    return _wrong(request, **{n: changed(getattr(request, n), values) for n, values in rolled.items()})


def scale(request: SdpaRequest) -> Results | None:
    """The scale a tenth too large."""
    return None if request.scores[-1] < 2 else _wrong(request, scale=request.factor * 1.1)


def _bound(name: str) -> Any:
    def wrong(request: SdpaRequest) -> Results | None:
        bound = getattr(request, name)
        return None if bound is None else _wrong(request, **{name: bound + 1})

    wrong.__doc__ = f"{name} one too far."
    return wrong


def length(request: SdpaRequest) -> Results | None:
    """One key of each sequence left out; of fp8, in which one of a hundred does not show, a quarter of them."""
    if request.seq_len_kv is None:
        return None
    values = np.asarray(request.seq_len_kv)
    values = values - np.minimum(np.maximum(values // 4, 1) if request.q.dtype.is_fp8 else 1, values)
    return _wrong(request, seq_len_kv=changed(request.seq_len_kv, values))


def bias(request: SdpaRequest) -> Results | None:
    """Each key with its neighbour's bias."""
    if request.bias is None:
        return None
    return _wrong(request, bias=changed(request.bias, np.roll(np.asarray(request.bias), 1, axis=-1)))


MUTATIONS = {
    "one key left out": key,
    "heads exchanged": heads,
    "groups of heads exchanged": shared_heads,
    "scale off": scale,
    "mask off by one on the right": _bound("right_bound"),
    "mask off by one on the left": _bound("left_bound"),
    "sequences too short": length,
    "bias of the key beside": bias,
}
