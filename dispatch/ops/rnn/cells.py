"""One step of each recurrent cell, forward and backward, for a batch of sequences, in NumPy.

`reference.py` iterates over steps, layers and directions with these functions. Axes before that of the sequences are
batches, too; each batch may have its own weights. The equations are those of cuDNN's documentation of
`cudnnRNNMode_t`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import sigmoid
from dispatch.ops.rnn.network import RnnMode

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array
    from dispatch.ops.rnn.network import Network

__all__ = ["NO_ROUNDING", "Rounding", "amplification", "backward_step", "forward_step", "unrounded"]

Named = dict[str, "Array"]


def unrounded(array: Array) -> Array:
    """No rounding."""
    return array


class Rounding(NamedTuple):
    """How a step rounds: `kept` for values that are stored or multiplied by a matrix, `product` for matrix products."""

    kept: Callable[[Array], Array] = unrounded
    product: Callable[[Array], Array] = unrounded


NO_ROUNDING = Rounding()


def _split_gates(gates: Array, count: int) -> list[Array]:
    """The parts of an array of gates: np.split in a fraction of its time."""
    size = gates.shape[-1] // count
    return [gates[..., start : start + size] for start in range(0, count * size, size)]


def _products(weights: Named, product: Array, h: Array, has_state: bool, rounding: Rounding) -> tuple[Array, Array]:
    """The products of the input (passed in) and of the state, each with its bias if it has one."""
    of_input = rounding.product(product)
    of_state = rounding.product(h @ weights["weight_hh_"].mT) if has_state else np.zeros_like(of_input)
    if "bias_ih_" in weights:
        of_input = of_input + weights["bias_ih_"]
    if "bias_hh_" in weights:
        of_state = of_state + weights["bias_hh_"]
    return of_input, of_state


def forward_step(
    network: Network,
    weights: Named,
    product: Array,
    h: Array,
    c: Array,
    rounding: Rounding = NO_ROUNDING,
    *,
    has_state: bool = True,
) -> Named:
    """The results of a step (next_h, next_c) and the values that the backward pass needs.

    `product` is the input times the weights, without a bias: computing it for all steps at once is faster. Without
    `has_state` there is no state yet, and no product with it, because 0 times NaN would be NaN.
    """
    of_input, of_state = _products(weights, product, h, has_state, rounding)
    results: Named = {"h": h, "c": c, "next_c": c}
    if network.mode is RnnMode.LSTM:
        total = of_input + of_state
        gates = sigmoid(total)
        i, f, g, o = _split_gates(gates, 4)
        np.tanh(_split_gates(total, 4)[2], out=g)
        results["next_c"] = f * c + i * g
        results["tanh_c"] = np.tanh(results["next_c"])
        results["next_h"] = results["unprojected"] = o * results["tanh_c"]
        if network.projection:
            results["next_h"] = rounding.kept(results["unprojected"]) @ weights["weight_hr_"].mT
        results["gates"] = gates
    elif network.mode is RnnMode.GRU:
        gates, of_n = np.empty_like(of_input), _split_gates(of_state, 3)[2]
        r, z, n = _split_gates(gates, 3)
        two = 2 * r.shape[-1]
        gates[..., :two] = sigmoid(of_input[..., :two] + of_state[..., :two])
        np.tanh(_split_gates(of_input, 3)[2] + r * of_n, out=n)
        results["product"] = of_n
        results["next_h"] = (1 - z) * n + z * h
        results["gates"] = gates
    else:
        total = of_input + of_state
        results["next_h"] = np.tanh(total) if network.mode is RnnMode.RNN_TANH else np.maximum(total, 0)
        results["gates"] = results["next_h"]
    return _rounded(results, rounding)


def _rounded(found: Named, rounding: Rounding) -> Named:
    """The results of a step, rounded; the state and the cell before the step already are."""
    if rounding.kept is unrounded:
        return found
    return {name: array if name in ("h", "c") else rounding.kept(array) for name, array in found.items()}


def backward_step(
    network: Network, weights: Named, kept: Named, dh: Array, dc: Array, rounding: Rounding = NO_ROUNDING
) -> Named:
    """The gradients of a step's gates, and of the state (dh) and cell (dc) before it, from those after the step."""
    gates = kept["gates"]
    results: Named = {"dc": dc, "d_projected": dh}
    direct: Any = 0  # the part of dh that reaches the previous state without passing through the gates
    if network.mode is RnnMode.LSTM:
        results["d_input"], results["dc"] = _lstm_gates(network, weights, kept, dh, dc, rounding)
        results["d_state"] = results["d_input"]
    elif network.mode is RnnMode.GRU:
        r, z, n = _split_gates(gates, 3)
        d_n = dh * (1 - z) * (1 - n * n)
        d_r = d_n * kept["product"] * r * (1 - r)
        d_z = dh * (kept["h"] - n) * z * (1 - z)
        results["d_input"] = np.concatenate([d_r, d_z, d_n], axis=-1)
        results["d_state"] = np.concatenate([d_r, d_z, d_n * r], axis=-1)
        direct = dh * z
    else:
        tanh = network.mode is RnnMode.RNN_TANH
        # ReLU sets the gradient of a dropped element to 0, even if it was NaN.
        results["d_input"] = results["d_state"] = dh * (1 - gates * gates) if tanh else np.where(gates <= 0, 0, dh)
    results["dh"] = rounding.product(rounding.kept(results["d_state"]) @ weights["weight_hh_"]) + direct
    return _rounded(results, rounding)


def _lstm_gates(
    network: Network, weights: Named, kept: Named, dh: Array, dc: Array, rounding: Rounding
) -> tuple[Array, Array]:
    """The gradients of the gates before their activations, and of the cell before the step."""
    i, f, g, o = _split_gates(kept["gates"], 4)
    d_out = rounding.product(rounding.kept(dh) @ weights["weight_hr_"]) if network.projection else dh
    d_cell = dc + d_out * o * (1 - kept["tanh_c"] * kept["tanh_c"])
    d_gates = [
        d_cell * g * i * (1 - i),
        d_cell * kept["c"] * f * (1 - f),
        d_cell * i * (1 - g * g),
        d_out * kept["tanh_c"] * o * (1 - o),
    ]
    return np.concatenate(d_gates, axis=-1), np.asarray(d_cell * f)


def amplification(network: Network, kept: Named) -> Array:
    """How much larger the relative errors of the gates' gradients are than those of the gates, which are saved.

    A gradient contains 1 - g of a sigmoid, or 1 - g² of a tanh: small if a gate is close to 1, where its error is still
    a rounding error of numbers close to 1. In an LSTM the cell's tanh is a factor of three gates' gradients, too.
    """
    gates = kept["gates"]
    if network.mode is RnnMode.RNN_RELU:
        return np.ones_like(gates)
    squares = gates * gates
    if network.mode is RnnMode.RNN_TANH:
        return np.asarray(1 / (1 - squares))
    inverse = 1 / (1 - gates)
    count = 4 if network.mode is RnnMode.LSTM else 3
    np.divide(1, 1 - _split_gates(squares, count)[2], out=_split_gates(inverse, count)[2])
    if network.mode is RnnMode.LSTM:
        of_cell = 1 / (1 - kept["tanh_c"] * kept["tanh_c"]) - 1
        inverse[..., : 3 * of_cell.shape[-1]] += np.concatenate([of_cell] * 3, axis=-1)
    return np.asarray(inverse)
