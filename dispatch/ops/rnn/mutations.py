"""Wrong recurrent networks that every case must reject: see `dispatch/testing/mutations.py`.

They use the case that a check was drawn from, because a backward request has no f64 forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.rnn.cases import PASSES
from dispatch.ops.rnn.cells import unrounded
from dispatch.testing.mutations import made

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]


def named(request: Any, result: Any) -> dict[str, Tensor]:
    """The results of a pass, without the reserve space, whose content depends on the library."""
    return {name: t for name, t in made(request, result).items() if name in PASSES[request.op]}


def _results(drawn: Any, found: dict[str, Array]) -> Results:
    return {name: found[source] for name, source in PASSES[drawn.case.op].items() if source in found}


def _wrong(drawn: Any, operands: dict[str, Array] | None = None, weights: dict[str, Array] | None = None) -> Results:
    """The results of the passes for other operands or weights."""
    return _results(drawn, drawn._passes(drawn.operands if operands is None else operands, unrounded, weights)[0])


def gate(drawn: Any) -> Results | None:
    """The last gate of the first layer without its state; skipped for one unit, whose state may be almost 0."""
    if drawn.network.hidden_size < 2:
        return None
    rows = drawn.named["weight_hh_l0"].copy()
    rows[-drawn.network.hidden_size :] = 0
    return _wrong(drawn, weights={**drawn.named, "weight_hh_l0": rows})


def bias(drawn: Any) -> Results | None:
    """The first layer's bias left out."""
    name = next((name for name in ("bias_ih_l0", "bias_hh_l0") if name in drawn.named), None)
    if name is None or drawn.network.hidden_size < 2:
        return None
    return _wrong(drawn, weights={**drawn.named, name: np.zeros_like(drawn.named[name])})


def step(drawn: Any) -> Results | None:
    """The first step's input left out, and the gradient of its output."""
    if drawn.case.steps < 2:
        return None
    operands = {**drawn.operands, **{name: drawn.operands[name].copy() for name in ("x", "dy")}}
    operands["x"][0] = operands["dy"][0] = 0
    return _wrong(drawn, operands)


def backward(drawn: Any) -> Results | None:
    """The steps in reverse."""
    if drawn.case.steps < 2:
        return None
    return _wrong(drawn, {**drawn.operands, **{name: drawn.operands[name][::-1] for name in ("x", "dy")}})


def states(drawn: Any) -> Results | None:
    """The first states, or the gradients of the last ones, left out."""
    if not drawn.case.with_states or drawn.case.op == "rnn_bwd_weights":
        return None
    return _wrong(drawn, {name: a if name in ("x", "dy") else np.zeros_like(a) for name, a in drawn.operands.items()})


def all_zeros(drawn: Any) -> Results:
    """A result of zeros."""
    return {"out": np.zeros_like(_results(drawn, drawn.expected)["out"])}


MUTATIONS = {
    "a gate without the state": gate,
    "bias left out": bias,
    "one step left out": step,
    "steps in reverse": backward,
    "states left out": states,
    "all zeros": all_zeros,
}
