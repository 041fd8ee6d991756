"""The test cases of the activation rows, and the allowed errors relative to the float64 reference.

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

COEF = 1.43  # not representable in 16 bits, so that no input is exactly at the ceiling
Form = tuple[str, tuple[int, ...], tuple[int, ...] | None, int, bool]
# Name, shape, order of the axes in memory, gap after every axis, and whether the output is the input's memory.
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
    """A case with fresh operands, positive and negative, up to the flat parts of the function."""
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
    """The allowed error of y or dx.

    For y, the exponential has an error of (4 + 2 |argument|) · u, and a few operations follow. For dx, the slope has
    the same error, times dy. The library may compute the slope from x or from y; y was rounded to its dtype, by w,
    which changes the slope by at most 2 w |y|.
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
    """Every form, with alternating modes, and the plain form with all modes."""
    dtype, backward = row.dtypes[0], row.op == "activation_bwd"
    return [
        MadeCase(f"{dtype}-{mode.name}-{form[0]}", partial(check, form, dtype, mode, backward), form[0])
        for form, mode in in_turn(FORMS, list(ActivationMode), plain=("primes",))
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 16  # elements: with fewer, the two functions may agree


def following(request: ElementwiseRequest) -> ActivationMode:
    """The next activation."""
    modes = list(ActivationMode)
    return modes[(modes.index(member(request.mode)) + 1) % len(modes)]


def its_coef(request: ElementwiseRequest) -> float:
    """The request's coefficient, if the next activation has one."""
    return request.coef if following(request) in WITH_COEF else 1.0


def larger_coef(request: ElementwiseRequest) -> float | None:
    """A coefficient that is a tenth too large."""
    return request.coef * 1.1 if request.mode in WITH_COEF else None


MUTATIONS = {
    "another activation": with_fields(evaluate, FEW, mode=following, coef=its_coef),
    "coefficient off": with_fields(evaluate, FEW, coef=larger_coef),
}
