"""Wrong activations that every case must reject: see `dispatch/mutation.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dispatch.cudnn.formulas import EXACT
from dispatch.mutation import made
from dispatch.ops.activation.formulas import evaluate
from dispatch.ops.activation.request import WITH_COEF, ActivationMode

if TYPE_CHECKING:
    from dispatch.ops.activation.request import ActivationBwdRequest, ActivationRequest
    from dispatch.tensor import Array

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
