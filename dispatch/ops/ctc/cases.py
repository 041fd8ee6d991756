"""The cases that the CTC rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.trial(device, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.ctc.reference import evaluate
from dispatch.ops.ctc.request import CtcRequest
from dispatch.testing.check import Trial, normal, place, poison, rounded, unit

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["CtcCase", "cases"]

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

    def trial(self, device: Device, rng: np.random.Generator) -> Trial:
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
            *(logits, labels, label_lengths, input_lengths, self.longest, self.with_gradient, self.deterministic),
            *(memory.view for memory in written),
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
        return Trial(self.id, request, expected, allowed, tuple(written))


def cases(row: Row) -> list[CtcCase]:
    """Every form with its gradient; some without, and some in any order."""
    found = []
    for number, form in enumerate(FORMS):
        found.append(CtcCase(*form, row.dtypes[0], True, True))
        found.append(CtcCase(*form, row.dtypes[0], number % 2 == 0, number % 3 == 0))
    return list({case.id: case for case in found}.values())
