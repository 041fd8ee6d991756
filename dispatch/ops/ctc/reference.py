"""What a CtcRequest means, in NumPy: the forward and backward variables of each sequence, in logarithms.

After Graves, Fernández, Gomez, Schmidhuber, "Connectionist Temporal Classification" (2006), equations 6 to 16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, Results, values
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.ctc.request import CtcRequest

__all__ = ["evaluate", "reference"]


def evaluate(request: CtcRequest, work: np.dtype[Any]) -> Results:
    """The losses and the gradient by name, in a working dtype; BadRequest for lengths or labels out of range."""
    logits = values(request.logits, work)
    largest = logits.max(axis=-1, keepdims=True)
    logs = logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))
    losses, gradient = np.zeros(logits.shape[1], work), np.zeros_like(logits)
    for number, (labels, steps) in enumerate(_sequences(request)):
        losses[number], gradient[:steps, number] = _one(logs[:steps, number], labels)
    return {"out": losses, "gradient": gradient}


def _sequences(request: CtcRequest) -> list[tuple[Array, int]]:
    """The labels and the number of steps of each sequence, once they are known to be in range."""
    steps, _, classes = request.logits.shape
    labels, lengths, counts = (np.asarray(t) for t in (request.labels, request.label_lengths, request.input_lengths))
    if lengths.min() < 1 or lengths.max() > request.max_label_length or lengths.sum() > len(labels):
        wanted = f"1 to {request.max_label_length} labels each, {len(labels)} in all"
        raise BadRequest("label_lengths", str(lengths.tolist()), wanted)
    if counts.min() < 0 or counts.max() > steps:
        raise BadRequest("input_lengths", str(counts.tolist()), f"0 to {steps} steps each")
    used = labels[: lengths.sum()]
    if used.min() < 1 or used.max() >= classes:
        raise BadRequest("labels", f"labels from {used.min()} to {used.max()}", f"labels from 1 to {classes - 1}")
    ends = np.cumsum(lengths)
    return [(labels[end - length : end], int(count)) for end, length, count in zip(ends, lengths, counts, strict=True)]


def _one(logs: Array, labels: Array) -> tuple[Any, Array]:
    """The loss of one sequence, and its gradient by the logits of its steps."""
    states = np.zeros(2 * len(labels) + 1, np.int64)
    states[1::2] = labels
    skips = np.zeros(len(states), np.bool_)  # whether a state can be reached from the last but one
    skips[2:] = (states[2:] != 0) & (states[2:] != states[:-2])
    chosen = logs[:, states]
    if len(logs) < len(labels) + (labels[1:] == labels[:-1]).sum():
        return 0.0, np.zeros_like(logs)
    forward = _walk(chosen, skips)
    # The same walk from the end: a skip into a state becomes one out of it.
    backward = _walk(chosen[::-1, ::-1], np.append(skips[2:], [False, False])[::-1])[::-1, ::-1]
    total = np.logaddexp(forward[-1, -1], forward[-1, -2])
    # Both walks count the step itself; where it has no probability, no path goes through it.
    shares = np.where(np.isneginf(chosen), 0, np.exp(forward + backward - chosen - total))
    gradient = np.exp(logs)
    for state, label in enumerate(states):
        gradient[:, label] -= shares[:, state]
    return -total, gradient


def _walk(chosen: Array, skips: Array) -> Array:
    """The logarithms of the probabilities of all paths from the start to each state, step by step."""
    reached = np.full_like(chosen, -np.inf)
    reached[0, :2] = chosen[0, :2]
    for step in range(1, len(chosen)):
        before = reached[step - 1]
        paths = before.copy()
        paths[1:] = np.logaddexp(paths[1:], before[:-1])
        paths[2:] = np.where(skips[2:], np.logaddexp(paths[2:], before[:-2]), paths[2:])
        reached[step] = paths + chosen[step]
    return reached


def reference(request: CtcRequest) -> Results:
    """The losses and the gradient of a request in float64, by name."""
    return evaluate(request, EXACT)
