"""Wrong softmax that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.softmax.reference import evaluate
from dispatch.ops.softmax.request import SoftmaxAlgorithm, SoftmaxBwdRequest, SoftmaxRequest
from dispatch.testing.mutations import changed, made
from dispatch.testing.roundoff import ROUNDOFF

if TYPE_CHECKING:
    from dispatch.device.layout import Array

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

named = made


def element(request: SoftmaxRequest | SoftmaxBwdRequest) -> Results | None:
    """An element left out of the sum: of those whose share is a typical one, or of dY the first of each row."""
    if not request.x.size if isinstance(request, SoftmaxRequest) else not request.y.size:
        return None
    if isinstance(request, SoftmaxBwdRequest):
        values = np.asarray(request.dy).copy()
        np.moveaxis(values, request.axis, 0)[0] = 0
        return evaluate(replace(request, dy=changed(request.dy, values)), EXACT)
    shares = evaluate(replace(request, algorithm=SoftmaxAlgorithm.ACCURATE), EXACT)["out"]
    lost = np.sort(shares, axis=request.axis)
    heavy = (lost.cumsum(axis=request.axis) < 0.5).sum(axis=request.axis, keepdims=True)
    share = np.take_along_axis(lost, np.minimum(heavy, shares.shape[request.axis] - 1), request.axis)
    if shares.shape[request.axis] < 2 or share.max() < 4 * ROUNDOFF[request.x.dtype][0]:  # the dtype rounds it away
        return None
    right = evaluate(request, EXACT)["out"]
    log = request.algorithm is SoftmaxAlgorithm.LOG
    return {"out": right - np.log1p(-share) if log else right / (1 - share)}


def axis(request: SoftmaxRequest | SoftmaxBwdRequest) -> Results | None:
    """Along the axis beside."""
    first = request.reads[0]
    rank = len(getattr(request, first).shape)
    if rank < 2 or not getattr(request, first).size:
        return None
    return evaluate(replace(request, axis=(request.axis + 1) % rank), EXACT)


MUTATIONS = {"one element left out": element, "another axis": axis}
