"""Wrong losses that every case must reject: see `dispatch/testing/mutations.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.ctc.reference import evaluate
from dispatch.testing.mutations import changed, made

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.ctc.request import CtcRequest

    Results = dict[str, Array]

__all__ = ["MUTATIONS", "named"]

named = made


def blank(request: CtcRequest) -> Results | None:
    """The blank with the first label's logits."""
    values = np.asarray(request.logits).copy()
    values[..., 0] = values[..., 1]
    return evaluate(replace(request, logits=changed(request.logits, values)), EXACT)


def step(request: CtcRequest) -> Results | None:
    """The longest sequence one step short."""
    counts = np.asarray(request.input_lengths).copy()
    if counts.max() < 2:
        return None
    counts[np.argmax(counts)] -= 1
    return evaluate(replace(request, input_lengths=changed(request.input_lengths, counts)), EXACT)


def label(request: CtcRequest) -> Results | None:
    """One label taken for another."""
    classes = request.logits.shape[-1]
    if classes < 3:
        return None
    labels = np.asarray(request.labels).copy()
    labels[0] = labels[0] % (classes - 1) + 1
    return evaluate(replace(request, labels=changed(request.labels, labels)), EXACT)


MUTATIONS = {"another blank": blank, "one step left out": step, "another label": label}
