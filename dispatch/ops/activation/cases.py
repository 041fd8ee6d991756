"""The cases that the activation rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.activation import WITH_COEF, ActivationBwdRequest, ActivationMode, ActivationRequest, evaluate
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, normal, place, poison, rounded, unit
from dispatch.testing.mutations import made

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "ActivationCase", "cases", "named"]

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
        coef = COEF if self.mode in WITH_COEF else 1.0
        x = self._lay(device, normal(rng, self.dtype, self.shape, 3.0))
        source = ActivationRequest(x.view, mode=self.mode, coef=coef)
        if not self.backward:
            memory = x if self.in_place else self._lay(device, poison(self.dtype, self.shape))
            request = ActivationRequest(x.view, mode=self.mode, coef=coef, out=memory.view)
            expected = evaluate(request, EXACT)
            return Check(self.id, request, expected, {"out": bound_forward(request, expected)}, (memory,))
        y = self._lay(device, evaluate(source, EXACT)["out"].astype(self.dtype.numpy))
        dy = self._lay(device, normal(rng, self.dtype, self.shape))
        memory = dy if self.in_place else self._lay(device, poison(self.dtype, self.shape))
        gradient = ActivationBwdRequest(x.view, y.view, dy.view, mode=self.mode, coef=coef, out=memory.view)
        expected = evaluate(gradient, EXACT)
        return Check(self.id, gradient, expected, {"out": bound_backward(gradient, expected)}, (memory,))

    def _lay(self, device: Device, values: Array) -> GuardedBuffer:
        return place(device, values, self.order, self.gap)


def bound_forward(request: ActivationRequest, expected: Results) -> Array:
    """How far y may be off: by a power of e, of error (4 + 2 |argument|) · u, and a few operations after it."""
    x = np.abs(np.asarray(request.x).astype(np.float64))
    y, dtype = expected["out"], request.x.dtype
    if request.mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):
        return rounded(unit(dtype) * np.abs(y), y, dtype)
    return rounded((8 + 4 * x) * unit(dtype) * np.maximum(np.abs(y), 1), y, dtype)


def bound_backward(request: ActivationBwdRequest, expected: Results) -> Array:
    """How far dx may be off: by the slope's error, as above, times dy.

    Which of x and y the slope is taken from is the library's choice; y was rounded to its dtype, by w, and the slope
    passes that on by at most 2 w |y|.
    """
    x, y, dy = (np.abs(np.asarray(tensor).astype(np.float64)) for tensor in (request.x, request.y, request.dy))
    dx, dtype = expected["out"], request.x.dtype
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
