"""Wrong pooling that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.pooling.reference import evaluate
from dispatch.ops.pooling.request import PoolingBwdRequest, PoolingMode, PoolingRequest
from dispatch.testing.mutations import changed, made

if TYPE_CHECKING:
    from dispatch.device.layout import Array

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

named = made


def tap(request: PoolingRequest | PoolingBwdRequest) -> Results | None:
    """One element of one image left out: where it is the largest of its window, or of dY."""
    if not request.x.size:
        return None
    tensor = request.dy if isinstance(request, PoolingBwdRequest) else request.x
    values = np.asarray(tensor).copy()
    place = values.size // 2
    if isinstance(request, PoolingRequest) and request.mode.is_max:
        place = int(np.argmax(values.astype(np.float64)))
        values.flat[place] = np.asarray(-100).astype(values.dtype)
    else:
        values.flat[place] = 0
    if isinstance(request, PoolingBwdRequest):
        return evaluate(replace(request, dy=changed(tensor, values)), EXACT)
    return evaluate(replace(request, x=changed(tensor, values)), EXACT)


def counting(request: PoolingRequest | PoolingBwdRequest) -> Results | None:
    """An average with the padding counted where it is not to be, and the other way round."""
    kinds = (PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING, PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING)
    if request.mode not in kinds or not request.x.size:
        return None
    return evaluate(replace(request, mode=kinds[request.mode is kinds[0]]), EXACT)


MUTATIONS = {"one element left out": tap, "padding counted otherwise": counting}
