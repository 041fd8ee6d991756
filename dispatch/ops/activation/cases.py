"""The cases that the activation rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import member
from dispatch.ops.activation import WITH_COEF, ActivationBwdRequest, ActivationMode, ActivationRequest, evaluate
from dispatch.testing.check import (
    ROUNDOFF,
    MadeCase,
    checked,
    in_turn,
    normal,
    place,
    result_of,
    rounded,
    unit,
    with_outputs,
)
from dispatch.testing.mutations import with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.ops.activation import ElementwiseRequest
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

COEF = 1.43  # no 16-bit float, so that no input is at the ceiling itself
Form = tuple[str, tuple[int, ...], tuple[int, ...] | None, int, bool]
# Name, shape, order of the axes in memory, gap behind every axis, and whether the output is the input's memory.
# fmt: off
FORMS: tuple[Form, ...] = (
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


def check(
    form: Form, dtype: Dtype, mode: ActivationMode, backward: bool, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A case with fresh operands, on both sides of 0 and into the flat ends."""
    _, shape, order, gap, in_place = form
    chosen: dict[str, Any] = {"mode": mode, "coef": COEF if mode in WITH_COEF else 1.0}
    lay = partial(place, device, order=order, gap=gap)
    x = last = lay(normal(rng, dtype, shape, 3.0))
    request: ElementwiseRequest = ActivationRequest(x.view, **chosen)
    if backward:
        y = lay(result_of(evaluate, request))
        last = lay(normal(rng, dtype, shape))
        request = ActivationBwdRequest(x.view, y.view, last.view, **chosen)
    return checked(name, with_outputs(request, (lambda _: last) if in_place else lay), evaluate, bounds)


def bounds(request: ElementwiseRequest, expected: Results) -> Results:
    """How far y or dx may be off.

    y by a power of e, of error (4 + 2 |argument|) · u, and a few operations after it; dx by the slope's error, as that,
    times dy. Which of x and y the slope is taken from is the library's choice; y was rounded to its dtype, by w, and
    the slope passes that on by at most 2 w |y|.
    """
    x, y, dy = (np.abs(np.asarray(getattr(request, name, 0)).astype(np.float64)) for name in ("x", "y", "dy"))
    out, dtype = expected["out"], request.x.dtype
    if request.mode in (ActivationMode.RELU, ActivationMode.CLIPPED_RELU):
        error = unit(dtype) * np.abs(out)
    elif isinstance(request, ActivationBwdRequest):
        error = ((16 + 8 * x) * unit(dtype) * (1 + x) + 2 * ROUNDOFF[dtype][0] * y) * dy
    else:
        error = (8 + 4 * x) * unit(dtype) * np.maximum(np.abs(out), 1)
    return {"out": rounded(error, out, dtype)}


def cases(row: Row) -> list[MadeCase]:
    """Every form in turn with the modes, and the plain one with all of them."""
    dtype, backward = row.dtypes[0], row.op == "activation_bwd"
    return [
        MadeCase(f"{dtype}-{mode.name}-{form[0]}", partial(check, form, dtype, mode, backward), form[0])
        for form, mode in in_turn(FORMS, list(ActivationMode), plain=("primes",))
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 16  # elements, none of which need be where the two differ


def following(request: ElementwiseRequest) -> ActivationMode:
    """The next of the activations."""
    modes = list(ActivationMode)
    return modes[(modes.index(member(request.mode)) + 1) % len(modes)]


def its_coef(request: ElementwiseRequest) -> float:
    """This one's coefficient for the next, where that has one."""
    return request.coef if following(request) in WITH_COEF else 1.0


def larger_coef(request: ElementwiseRequest) -> float | None:
    """The coefficient a tenth too large."""
    return request.coef * 1.1 if request.mode in WITH_COEF else None


MUTATIONS = {
    "another activation": with_fields(evaluate, FEW, mode=following, coef=its_coef),
    "coefficient off": with_fields(evaluate, FEW, coef=larger_coef),
}
