"""Wrong reductions that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.reduction.reference import evaluate
from dispatch.ops.reduction.request import ReduceOp
from dispatch.testing.mutations import changed, made, typical

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.reduction.request import ReduceRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

named = made


def element(request: ReduceRequest) -> Results | None:
    """One element left out: the one that is chosen, or a typical one of what is summed up."""
    if not request.x.size:
        return None
    values = np.asarray(request.x).copy()
    exact = values.astype(np.float64).ravel()
    neutral = 1 if request.reduce in (ReduceOp.MUL, ReduceOp.MUL_NO_ZEROS) else 0
    if request.reduce in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AMAX):
        place = int(np.argmin(exact) if request.reduce is ReduceOp.MIN else np.argmax(exact))
        place = int(np.argmax(np.abs(exact))) if request.reduce is ReduceOp.AMAX else place
    else:
        place = typical(np.abs(exact - neutral))
    values.flat[place] = neutral
    return evaluate(replace(request, x=changed(request.x, values)), EXACT)


def index(request: ReduceRequest) -> Results | None:
    """The place of the neighbour."""
    if not request.indices or not request.x.size:
        return None
    return {"index": evaluate(request, EXACT)["index"] + np.uint32(1)}


MUTATIONS = {"one element left out": element, "the place beside": index}
