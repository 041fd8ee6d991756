"""The cases that the activation rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.activation import WITH_COEF, ActivationBwdRequest, ActivationMode, ActivationRequest, evaluate
from dispatch.testing.check import ROUNDOFF, Check, check_of, normal, place, result_of, rounded, unit
from dispatch.testing.mutations import with_fields

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "ActivationCase", "cases"]

COEF = 1.43  # no 16-bit float, so that no input is at the ceiling itself
# Name, shape, order of the axes in memory, gap behind every axis, and whether the output is the input's memory.
# fmt: off
FORMS = (
    ("one element",   (1,),               None,            0, False),
    ("scalar",        (),                 None,            0, False),
    ("primes",        (7, 13, 31),        None,            0, False),
    ("channels last", (2, 19, 3, 7),      (0, 2, 3, 1),    0, False),
    ("six axes",      (2, 3, 2, 5, 2, 3), None,            0, False),
    ("gaps",          (2, 5, 3, 7),       None,            1, False),
    ("transposed",    (11, 6),            (1, 0),          0, False),
    ("in place",      (6, 37),            None,            0, True),
    ("nothing",       (3, 0),             None,            0, False),
    ("large",         (1 << 18,),         None,            0, False),
)
# fmt: on


@dataclass(frozen=True)
class ActivationCase:
    """One request, by all that is chosen about it but the numbers in it."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    gap: int
    in_place: bool
    dtype: Dtype
    mode: ActivationMode
    backward: bool

    @property
    def id(self) -> str:
        return f"{self.dtype}-{self.mode.name}-{self.name}"

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands, on both sides of 0 and into the flat ends."""
        fields: dict[str, Any] = {"mode": self.mode, "coef": COEF if self.mode in WITH_COEF else 1.0}
        lay = partial(place, device, order=self.order, gap=self.gap)
        drawn = {"x": normal(rng, self.dtype, self.shape, 3.0)}
        if not self.backward:
            in_place = "x" if self.in_place else ""
            return check_of(self.id, ActivationRequest, drawn, lay, evaluate, bound_forward, in_place, **fields)
        drawn["y"] = result_of(evaluate, ActivationRequest(lay(drawn["x"]).view, **fields))
        drawn["dy"] = normal(rng, self.dtype, self.shape)
        in_place = "dy" if self.in_place else ""
        return check_of(self.id, ActivationBwdRequest, drawn, lay, evaluate, bound_backward, in_place, **fields)


def bound_forward(request: ActivationRequest, y: Array) -> Array:
    """How far y may be off: by a power of e, of error (4 + 2 |argument|) · u, and a few operations after it."""
    x = np.abs(np.asarray(request.x).astype(np.float64))
    dtype = request.x.dtype
    if request.mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):
        return rounded(unit(dtype) * np.abs(y), y, dtype)
    return rounded((8 + 4 * x) * unit(dtype) * np.maximum(np.abs(y), 1), y, dtype)


def bound_backward(request: ActivationBwdRequest, dx: Array) -> Array:
    """How far dx may be off: by the slope's error, as above, times dy.

    Which of x and y the slope is taken from is the library's choice; y was rounded to its dtype, by w, and the slope
    passes that on by at most 2 w |y|.
    """
    x, y, dy = (np.abs(np.asarray(tensor).astype(np.float64)) for tensor in (request.x, request.y, request.dy))
    dtype = request.x.dtype
    if request.mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):
        return rounded(unit(dtype) * np.abs(dx), dx, dtype)
    slope = (16 + 8 * x) * unit(dtype) * (1 + x) + 2 * ROUNDOFF[dtype][0] * y
    return rounded(slope * dy, dx, dtype)


def cases(row: Row) -> list[ActivationCase]:
    """Every form in turn with the modes, and the plain one with all of them."""
    modes = list(ActivationMode)
    found = []
    for number, form in enumerate(FORMS):
        for turn, mode in enumerate(modes):
            if form[0] == "primes" or turn == number % len(modes):
                found.append(ActivationCase(*form, row.dtypes[0], mode, row.op == "activation_bwd"))
    return found


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------


def following(request: ActivationRequest | ActivationBwdRequest) -> ActivationMode:
    """The next of the activations."""
    modes = list(ActivationMode)
    return modes[(modes.index(request.mode) + 1) % len(modes)]


def its_coef(request: ActivationRequest | ActivationBwdRequest) -> float:
    """This one's coefficient for the next, where that has one."""
    return request.coef if following(request) in WITH_COEF else 1.0


def larger_coef(request: ActivationRequest | ActivationBwdRequest) -> float | None:
    """The coefficient a tenth too large."""
    return request.coef * 1.1 if request.mode in WITH_COEF else None


MUTATIONS = {
    "another activation": with_fields(evaluate, mode=following, coef=its_coef),
    "coefficient off": with_fields(evaluate, coef=larger_coef),
}
