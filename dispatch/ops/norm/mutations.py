"""Wrong normalizations that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.norm.reference import evaluate
from dispatch.ops.norm.request import NormFwdRequest, NormMode
from dispatch.testing.mutations import changed, neighbour

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.norm.request import NormRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS"]


def epsilon(request: NormRequest) -> Results | None:
    """A hundred times epsilon."""
    if not isinstance(request, NormFwdRequest):
        return None
    return evaluate(replace(request, epsilon=request.epsilon * 100), EXACT)


def mean(request: NormRequest) -> Results | None:
    """No mean subtracted."""
    if not isinstance(request, NormFwdRequest) or request.mode is not NormMode.LAYER_NORM:
        return None
    wrong = evaluate(replace(request, mode=NormMode.RMS_NORM, mean_out=None), EXACT)
    return {"out": wrong["out"]}


def _changed(name: str, *, left_out: bool) -> Any:
    def wrong(request: NormRequest) -> Results | None:
        tensor: Any = getattr(request, name, None)
        if tensor is None or isinstance(tensor, bool) or tensor.size < 2:
            return None
        values = np.zeros(tensor.shape) if left_out else neighbour(tensor, -1)
        return evaluate(request.replace(**{name: changed(tensor, values)}), EXACT)  # type: ignore[arg-type]  # of its own kind

    wrong.__doc__ = f"{name} {'left out' if left_out else 'of the neighbour'}."
    return wrong


def momentum(request: NormRequest) -> Results | None:
    """The running statistics moved on with another momentum."""
    if not isinstance(request, NormFwdRequest) or not request.training or request.running_mean is None:
        return None
    return evaluate(replace(request, momentum=request.momentum * 1.02), EXACT)


def element(request: NormRequest) -> Results | None:
    """One element of x, or of dY, left out."""
    name = "x" if isinstance(request, NormFwdRequest) else "dy"
    tensor = getattr(request, name)
    values = np.asarray(tensor).copy()
    values.flat[values.size // 2] = 0
    return evaluate(request.replace(**{name: changed(tensor, values)}), EXACT)  # type: ignore[arg-type]  # of its own kind


MUTATIONS = {
    "epsilon off": epsilon,
    "mean not subtracted": mean,
    "scale of the channel beside": _changed("scale", left_out=False),
    "bias of the channel beside": _changed("bias", left_out=False),
    "running mean left out": _changed("running_mean", left_out=True),
    "momentum off": momentum,
    "one element left out": element,
}
