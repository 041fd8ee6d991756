"""The test cases of the CTC rows, and the allowed errors relative to the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dispatch.ops.ctc import CtcRequest, evaluate
from dispatch.testing.check import MadeCase, checked, normal, place, rounded, unit, with_outputs
from dispatch.testing.mutations import with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

Form = tuple[str, int, int, tuple[int, ...], tuple[int, ...], int]
# Name, steps, classes, labels of each sequence, steps of each sequence, the maximum number of labels.
# fmt: off
FORMS: tuple[Form, ...] = (
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


def check(
    form: Form, dtype: Dtype, gradient: bool, deterministic: bool, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A case with fresh operands; some labels repeat if there are few classes."""
    _, steps, classes, label_lengths, input_lengths, longest = form
    labels = rng.integers(1, classes, sum(label_lengths))
    logits = device.array(normal(rng, dtype, (steps, len(label_lengths), classes), 2.0))
    numbers = (labels, np.array(label_lengths), np.array(input_lengths))
    request = CtcRequest(
        *(logits, *(device.array(array.astype(np.int32)) for array in numbers)),
        max_label_length=longest,
        with_gradient=gradient,
        deterministic=deterministic,
    )
    return checked(name, with_outputs(request, partial(place, device)), evaluate, bounds)


def bounds(request: CtcRequest, expected: Results) -> Results:
    """The allowed errors.

    The logarithm of a sum has an error of u of its own magnitude in each step, which adds up like a random walk. The
    relative error of its argument is as large, and so is that of a state's share in the gradient.
    """
    dtype, u = request.logits.dtype, unit(request.logits.dtype)
    powers = np.exp(np.asarray(request.logits).astype(np.float64))
    share = powers / powers.sum(axis=-1, keepdims=True) - expected["gradient"]
    off = (16 + 8 * np.sqrt(request.logits.shape[0])) * u * (1 + np.abs(expected["out"]))
    errors = {"out": off, "gradient": 2 * off[None, :, None] * np.abs(share) + 16 * u}
    return {name: rounded(error, expected[name], dtype) for name, error in errors.items()}


def cases(row: Row) -> list[MadeCase]:
    """Every form with its gradient; some without, and some without `deterministic`."""
    all_cases = {}
    for number, form in enumerate(FORMS):
        for gradient, deterministic in ((True, True), (number % 2 == 0, number % 3 == 0)):
            words = ["gradient" if gradient else "loss", "" if deterministic else "any order"]
            name = "-".join([str(row.dtypes[0]), *filter(None, words), form[0]])
            all_cases[name] = MadeCase(name, partial(check, form, row.dtypes[0], gradient, deterministic), form[0])
    return list(all_cases.values())


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
def blank(request: CtcRequest) -> Array:
    """The blank gets the first label's logits."""
    values = np.array(request.logits)
    values[..., 0] = values[..., 1]
    return values


def step(request: CtcRequest) -> Array | None:
    """The longest sequence is one step shorter."""
    counts = np.array(request.input_lengths)
    if counts.max() < 2:
        return None
    counts[np.argmax(counts)] -= 1
    return counts


def label(request: CtcRequest) -> Array | None:
    """One label replaced by another."""
    classes = request.logits.shape[-1]
    labels = np.array(request.labels)
    labels[0] = labels[0] % (classes - 1) + 1
    return labels if classes > 2 else None


MUTATIONS = {
    "another blank": with_fields(evaluate, logits=blank),
    "one step left out": with_fields(evaluate, input_lengths=step),
    "another label": with_fields(evaluate, labels=label),
}
