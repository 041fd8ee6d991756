"""Wrong activations that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dispatch.core.host_plan import EXACT
from dispatch.ops.activation.reference import evaluate
from dispatch.ops.activation.request import WITH_COEF, ActivationMode
from dispatch.testing.mutations import made

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.activation.request import ActivationBwdRequest, ActivationRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

named = made
FEW = 16  # elements, none of which need be where the two differ


def other(request: ActivationRequest | ActivationBwdRequest) -> Results | None:
    """The next of the activations, with this one's coefficient where it has one."""
    if request.x.size < FEW:
        return None
    modes = list(ActivationMode)
    mode = modes[(modes.index(request.mode) + 1) % len(modes)]
    return evaluate(replace(request, mode=mode, coef=request.coef if mode in WITH_COEF else 1.0), EXACT)


def coefficient(request: ActivationRequest | ActivationBwdRequest) -> Results | None:
    """The coefficient a tenth too large."""
    if request.mode not in WITH_COEF or request.x.size < FEW:
        return None
    return evaluate(replace(request, coef=request.coef * 1.1), EXACT)


MUTATIONS = {"another activation": other, "coefficient off": coefficient}
