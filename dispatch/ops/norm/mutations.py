"""Wrong normalizations that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dispatch.ops.norm.reference import evaluate
from dispatch.ops.norm.request import NormFwdRequest, NormMode
from dispatch.testing.mutations import altered, neighbour, of_operand, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.ops.norm.request import NormRequest

__all__ = ["MUTATIONS"]


def epsilon(request: NormRequest) -> float | None:
    """epsilon a hundred times too large."""
    return request.epsilon * 100 if isinstance(request, NormFwdRequest) else None


def mean(request: NormRequest) -> Results | None:
    """The mean not subtracted."""
    if not isinstance(request, NormFwdRequest) or request.mode is not NormMode.LAYER_NORM:
        return None
    return {"out": altered(evaluate, request, mode=NormMode.RMS_NORM, mean_out=None)["out"]}


def momentum(request: NormRequest) -> float | None:
    """The running statistics updated with another momentum."""
    if not isinstance(request, NormFwdRequest) or not request.training or request.running_mean is None:
        return None
    return request.momentum * 1.02


def element(request: NormRequest) -> Results:
    """One element of x, or of dY, left out."""
    values = np.array(getattr(request, request.reads[0]))
    values.flat[values.size // 2] = 0
    return altered(evaluate, request, **{request.reads[0]: values})


of_the_neighbour = partial(neighbour, axis=-1)
MUTATIONS = {
    "epsilon off": with_fields(evaluate, epsilon=epsilon),
    "mean not subtracted": mean,
    "scale of the channel beside": of_operand(evaluate, "scale", of_the_neighbour),
    "bias of the channel beside": of_operand(evaluate, "bias", of_the_neighbour),
    "running mean left out": of_operand(evaluate, "running_mean", np.zeros_like),
    "momentum off": with_fields(evaluate, momentum=momentum),
    "one element left out": element,
}
