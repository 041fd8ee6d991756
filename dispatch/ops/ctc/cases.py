"""The cases that the CTC rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.ctc import CtcRequest, evaluate
from dispatch.testing.check import Check, normal, place, poison, rounded, unit
from dispatch.testing.mutations import changed

if TYPE_CHECKING:
    from dispatch.device.layout import Array

    Results = dict[str, Array]
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "CtcCase", "cases"]

# Name, steps, classes, labels of each sequence, steps of each sequence, the longest sequence of labels that may be.
# fmt: off
FORMS: tuple[tuple[str, int, int, tuple[int, ...], tuple[int, ...], int], ...] = (
    ("one",           1,   2,    (1,),            (1,),               1),
    ("short",         7,   5,    (3,),            (7,),               3),
    ("uneven",        13,  7,    (3, 1, 5, 2),    (13, 4, 11, 9),     5),
    ("impossible",    9,   5,    (3, 6, 2),       (9, 4, 7),          6),
    ("no steps",      5,   4,    (2, 1),          (5, 0),             2),
    ("speech",        120, 29,   (31, 17, 40),    (120, 97, 118),     64),
    ("many classes",  31,  5003, (7, 3),          (31, 29),           255),
    ("too long",      600, 4,    (256,),          (600,),             256),
    ("many",          23,  11,   (2, 3, 5) * 11,  (23, 19, 17) * 11,  31),
)
# fmt: on


@dataclass(frozen=True)
class CtcCase:
    """One request, by all that is chosen about it but the numbers in it."""

    name: str
    steps: int
    classes: int
    label_lengths: tuple[int, ...]
    input_lengths: tuple[int, ...]
    longest: int
    dtype: Dtype
    with_gradient: bool
    deterministic: bool

    @property
    def id(self) -> str:
        words = ["gradient" if self.with_gradient else "loss", "" if self.deterministic else "any order"]
        return "-".join([str(self.dtype), *filter(None, words), self.name])

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands; labels repeat now and then, where there are few classes."""
        shape = (self.steps, len(self.label_lengths), self.classes)
        numbers = (
            rng.integers(1, self.classes, sum(self.label_lengths)),
            np.array(self.label_lengths),
            np.array(self.input_lengths),
        )
        logits = device.array(normal(rng, self.dtype, shape, 2.0))
        labels, label_lengths, input_lengths = (device.array(array.astype(np.int32)) for array in numbers)
        written = [place(device, poison(self.dtype, shape[1:2]))]
        if self.with_gradient:
            written.append(place(device, poison(self.dtype, shape)))
        request = CtcRequest(
            *(logits, labels, label_lengths, input_lengths),
            max_label_length=self.longest,
            with_gradient=self.with_gradient,
            deterministic=self.deterministic,
            **{name: memory.view for name, memory in zip(("out", "gradient"), written, strict=False)},
        )
        expected = evaluate(request, EXACT)
        # A logarithm of a sum is off by u of its own size, step after step, in a walk; what it is the logarithm of by
        # as much of itself, and so is the share of a state in the gradient.
        size = 1 + np.abs(expected["out"])
        powers = np.exp(logits.numpy().astype(np.float64))
        share = powers / powers.sum(axis=-1, keepdims=True) - expected["gradient"]
        off = (16 + 8 * np.sqrt(self.steps)) * unit(self.dtype) * size
        allowed = {
            "out": rounded(off, expected["out"], self.dtype),
            "gradient": rounded(
                2 * off[None, :, None] * np.abs(share) + 16 * unit(self.dtype), expected["gradient"], self.dtype
            ),
        }
        return Check(self.id, request, expected, allowed, tuple(written))


def cases(row: Row) -> list[CtcCase]:
    """Every form with its gradient; some without, and some in any order."""
    found = []
    for number, form in enumerate(FORMS):
        found.append(CtcCase(*form, row.dtypes[0], True, True))
        found.append(CtcCase(*form, row.dtypes[0], number % 2 == 0, number % 3 == 0))
    return list({case.id: case for case in found}.values())


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------


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
