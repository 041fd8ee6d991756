"""The formulas of recurrent networks in NumPy, step by step; the host's reserve space stores every step.

The forward pass writes its intermediate values to `Saved`, a view of the reserve space. The backward pass by the data
adds the gradients of the gates, and the backward pass by the weights only multiplies. Like cuDNN, a backward pass reads
its own operands (x, y and the first states), not the reserve space's copy. In f64 the same steps are the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import Results, draw, exactly, values
from dispatch.errors import BadRequest
from dispatch.ops.rnn.cells import NO_ROUNDING, Rounding, backward_step, forward_step
from dispatch.ops.rnn.network import RnnMode
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest, saved_sizes
from dispatch.ops.rnn.weights import named_views, pack, places

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor
    from dispatch.ops.rnn.network import Network
    from dispatch.ops.rnn.request import RnnBase, RnnRequest

__all__ = ["Saved", "backward_data", "backward_weights", "empty_saved", "evaluate", "forward", "reference"]

Saved = list[dict[str, "Array"]]  # by pseudo-layer: arrays (steps, sequences, size)
Named = dict[str, "Array"]
ASKED_FOR = ("h", "gates", "product", "c", "tanh_c")  # what a backward step reads


def saved_views(network: Network, steps: int, batch: int, buffer: Array) -> Saved:
    """The parts of a flat buffer in which each pseudo-layer stores its steps."""
    views: Saved = []
    start = 0
    for number in range(network.pseudo_layers):
        views.append({})
        for name, size in saved_sizes(network, number // network.directions).items():
            end = start + steps * batch * size
            views[-1][name] = buffer[start:end].reshape(steps, batch, size)
            start = end
    return views


def saved_size(network: Network, steps: int, batch: int) -> int:
    """The number of elements that a forward pass saves."""
    per_layer = [sum(saved_sizes(network, layer).values()) for layer in range(network.layers)]
    return steps * batch * network.directions * sum(per_layer)


def empty_saved(network: Network, steps: int, batch: int, work: np.dtype[Any]) -> tuple[Array, Saved]:
    """A buffer of zeros for a forward pass, and its parts."""
    buffer = np.zeros(saved_size(network, steps, batch), work)
    views = saved_views(network, steps, batch, buffer)
    for view in views:
        view["mask"][...] = 1  # nothing is dropped
    return buffer, views


def evaluate(request: RnnBase, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, computed in a working dtype; with the resulting reserve space."""
    network, (steps, batch) = request.network, request.sequence()[1].shape[:2]
    lengths = np.array(request.all_lengths())
    if isinstance(request, RnnBwdDataRequest):
        buffer = _buffer(request.reserve, request, work)
        named = _named(network, request.weights, work)
        saved = saved_views(network, steps, batch, buffer)
        _take(saved, request, lengths, work)
        dy = np.where(_active(steps, lengths), values(request.dy, work), 0)
        first = (_state(request.dhy, request.hidden_shape(), work), _state(request.dcy, request.cell_shape(), work))
        results = backward_data(network, named, saved, lengths, dy, *first)
        return {**results, "reserve": buffer.view(np.uint8)}
    if isinstance(request, RnnBwdWeightsRequest):
        buffer = _buffer(request.reserve, request, work)
        saved = saved_views(network, steps, batch, buffer)
        _take(saved, request, lengths, work)
        gradient = backward_weights(network, saved, lengths, has_state=request.hx is not None)
        offsets = places(network, request.x.dtype, request.device)
        return {"out": pack(network, gradient, offsets, work)}
    return _forward(request, work, lengths)


def _forward(request: RnnBase, work: np.dtype[Any], lengths: Array) -> Results:
    inference: Any = request
    forward_request: RnnRequest = inference
    network, (steps, batch) = forward_request.network, forward_request.x.shape[:2]
    buffer, saved = empty_saved(network, steps, batch, work)
    hx, cx = (
        _state(forward_request.hx, forward_request.hidden_shape(), work),
        _state(forward_request.cx, forward_request.cell_shape(), work),
    )
    results: Results = {}
    if forward_request.states is not None:
        results["states"] = _draw_masks(forward_request, saved, work)
    named = _named(network, forward_request.weights, work)
    has_state = forward_request.hx is not None
    results.update(
        forward(network, named, values(forward_request.x, work), hx, cx, lengths, saved, has_state=has_state)
    )
    if network.mode is not RnnMode.LSTM:
        del results["cy"]
    return {**results, "reserve": buffer.view(np.uint8)} if forward_request.training else results


def _draw_masks(request: RnnRequest, saved: Saved, work: np.dtype[Any]) -> Array:
    """Write the masks for the inputs of all layers but the first to `saved`; returns the state after that."""
    states, network = np.asarray(request.states), request.network
    for layer in range(1, network.layers):
        mask = saved[layer * network.directions]["mask"]
        keep_mask, states = draw(states, mask.size, request.dropout)
        mask[...] = keep_mask.reshape(mask.shape) * work.type(1 / (1 - request.dropout))
    return states


def forward(
    network: Network,
    named: Named,
    x: Array,
    hx: Array,
    cx: Array,
    lengths: Array,
    saved: Saved,
    rounding: Rounding = NO_ROUNDING,
    *,
    has_state: bool = True,
) -> Results:
    """y and the last states, from x (steps, …, sequences, inputs) and the first states; stores every step in `saved`.

    Without `has_state` there is no hx, and the first step has no product with it. Sequences that a backward direction
    starts later have one, with zeros, as in cuDNN.
    """
    hy, cy = hx.copy(), cx.copy()
    for layer in range(network.layers):
        outputs = []
        x = x * saved[layer * network.directions]["mask"]
        for number, end in _runs(network, layer):
            weights = {name.removesuffix(end): array for name, array in named.items() if name.endswith(end)}
            stored, y = saved[number], np.zeros((*x.shape[:-1], network.state_size), x.dtype)
            stored["x"][...] = np.where(
                _active(len(x), lengths), x, 0
            )  # after the end of a sequence, x may be anything
            first, shortest = _first(lengths, number, network).max(), lengths.min()
            products = x @ weights["weight_ih_"].mT
            for step in _order(len(x), number, network):
                inputs = products[step], hy[number], cy[number]
                step_results = forward_step(network, weights, *inputs, rounding, has_state=has_state or step != first)
                if step >= shortest:  # the states of sequences that have ended stay, and nothing is saved for them
                    active, before = (step < lengths)[..., None], {"next_h": hy[number], "next_c": cy[number]}
                    y[step] = np.where(active, step_results["next_h"], 0)
                    step_results = {
                        name: np.where(active, array, before.get(name, 0)) for name, array in step_results.items()
                    }
                else:
                    y[step] = step_results["next_h"]
                for name, array in step_results.items():
                    if name in stored:
                        stored[name][step] = array
                hy[number], cy[number] = step_results["next_h"], step_results["next_c"]
            outputs.append(y)
        x = np.concatenate(outputs, axis=-1)
    return {"out": x, "hy": hy, "cy": cy}


def backward_data(
    network: Network,
    named: Named,
    saved: Saved,
    lengths: Array,
    dy: Array,
    dhy: Array,
    dcy: Array,
    rounding: Rounding = NO_ROUNDING,
) -> Results:
    """dx and the gradients of the first states; the gradients of the gates are stored in `saved`."""
    dhx, dcx = dhy.copy(), dcy.copy()
    for layer in reversed(range(network.layers)):
        dx = np.zeros((*dy.shape[:-1], network.inputs_of(layer)), dy.dtype)
        for number, end in _runs(network, layer):
            weights = {name.removesuffix(end): array for name, array in named.items() if name.endswith(end)}
            stored = saved[number]
            part, shortest = slice((number % network.directions) * network.state_size, None), lengths.min()
            for step in reversed(_order(len(dy), number, network)):
                dh = dhx[number] + dy[step][..., part][..., : network.state_size]
                step_of = {name: stored[name][step] for name in ASKED_FOR}
                step_results = backward_step(network, weights, step_of, dh, dcx[number], rounding)
                step_results["dx"] = rounding.product(step_results["d_input"] @ weights["weight_ih_"])
                if step >= shortest:
                    active, before = (step < lengths)[..., None], {"dh": dhx[number], "dc": dcx[number]}
                    step_results = {
                        name: np.where(active, array, before.get(name, 0)) for name, array in step_results.items()
                    }
                for name in ("d_input", "d_state", "d_projected"):
                    stored[name][step] = step_results[name]
                dhx[number], dcx[number] = step_results["dh"], step_results["dc"]
                dx[step] += step_results["dx"]
        dy = rounding.kept(dx) * saved[layer * network.directions]["mask"]
    results = {"out": dy, "dhx": dhx}
    return {**results, "dcx": dcx} if network.mode is RnnMode.LSTM else results


def backward_weights(
    network: Network, saved: Saved, lengths: Array, rounding: Rounding = NO_ROUNDING, *, has_state: bool = True
) -> Named:
    """The gradients of the weights by name, summed over steps and sequences.

    Without `has_state` the first step had no product with the state, and adds nothing to the gradient of its weights.
    """
    named: Named = {}
    for layer in range(network.layers):
        for number, end in _runs(network, layer):
            stored = saved[number]
            of_state = stored["d_state"]
            if not has_state:
                of_state = of_state.copy()
                of_state[_first(lengths, number, network).max()] = 0
            named[f"weight_ih_{end}"] = _summed(stored["d_input"], stored["x"], rounding)
            named[f"weight_hh_{end}"] = _summed(of_state, stored["h"], rounding)
            for kind in network.biased:
                gates = stored["d_input" if kind == "ih" else "d_state"]
                ones = np.ones((*gates.shape[:-1], 1), gates.dtype)
                named[f"bias_{kind}_{end}"] = _summed(gates, ones, rounding)[..., 0]
            if network.projection:
                named[f"weight_hr_{end}"] = _summed(stored["d_projected"], stored["unprojected"], rounding)
    return named


def _summed(gradient: Array, given: Array, rounding: Rounding) -> Array:
    """The sum of the outer products of all steps and sequences, rounded after each step if there is a rounding."""
    if rounding is NO_ROUNDING:
        return np.asarray(gradient.reshape(-1, gradient.shape[-1]).T @ given.reshape(-1, given.shape[-1]))
    total = np.zeros((*gradient.shape[1:-2], gradient.shape[-1], given.shape[-1]), gradient.dtype)
    for of_step, operand in zip(gradient, given, strict=True):
        total = rounding.product(total + of_step.mT @ operand)
    return total


def _runs(network: Network, layer: int) -> Iterator[tuple[int, str]]:
    """The pseudo-layers of a layer, with the suffix of their weights' names."""
    for direction in range(network.directions):
        yield layer * network.directions + direction, f"l{layer}{'_reverse' if direction else ''}"


def _order(steps: int, number: int, network: Network) -> range:
    """The steps in the order in which a pseudo-layer processes them."""
    backward = number % network.directions == 1
    return range(steps - 1, -1, -1) if backward else range(steps)


def _first(lengths: Array, number: int, network: Network) -> Array:
    """The first step that a pseudo-layer processes, for each sequence."""
    return lengths - 1 if number % network.directions else np.zeros_like(lengths)


def _take(saved: Saved, request: RnnBwdDataRequest | RnnBwdWeightsRequest, lengths: Array, work: np.dtype[Any]) -> None:
    """Copy a backward pass's operands to `saved`: x, all previous states of the last layer, and the first states.

    The states between layers are not operands; they stay as the forward pass saved them.
    """
    network, (steps, batch) = request.network, request.sequence()[1].shape[:2]
    active, everyone = _active(steps, lengths), np.arange(batch)
    y = np.where(active, values(request.y, work), 0)
    hx = _state(request.hx, request.hidden_shape(), work)
    cx = _state(getattr(request, "cx", None), request.cell_shape(), work)
    for number, stored in enumerate(saved):
        direction = number % network.directions
        if number // network.directions == network.layers - 1:
            part = y[..., direction * network.state_size :][..., : network.state_size]
            before = np.roll(part, -1 if direction else 1, axis=0)
            stored["h"][...] = np.where(active, before, 0)
        first = _first(lengths, number, network)
        stored["h"][first, everyone] = hx[number]
        if isinstance(request, RnnBwdDataRequest):
            stored["c"][first, everyone] = cx[number]
        elif number < network.directions:
            stored["x"][...] = np.where(active, values(request.x, work), 0)


def _active(steps: int, lengths: Array) -> Array:
    """A mask of the steps that are within the length of their sequence."""
    return np.asarray((np.arange(steps).reshape(-1, *(1,) * lengths.ndim) < lengths)[..., None])


def _named(network: Network, weights: Tensor, work: np.dtype[Any]) -> Named:
    offsets = places(network, weights.dtype, weights.device)
    return named_views(network, values(weights, work), offsets)


def _state(tensor: Tensor | None, shape: tuple[int, ...], work: np.dtype[Any]) -> Array:
    return np.zeros(shape, work) if tensor is None else values(tensor, work)


def _buffer(reserve: Tensor, request: RnnBase, work: np.dtype[Any]) -> Array:
    """A copy of the reserve space as numbers; BadRequest if its size differs from that of a forward pass."""
    steps, batch = request.sequence()[1].shape[:2]
    expected_bytes = saved_size(request.network, steps, batch) * work.itemsize
    if reserve.nbytes != expected_bytes:
        raise BadRequest(
            "reserve", str(reserve.layout), f"u8[{expected_bytes}]", "pass the reserve that training=True returned"
        )
    return np.array(reserve).view(work)


reference = exactly(evaluate)
