"""The test cases of the softmax rows, and the bounds of their results.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import HALF, Dtype
from dispatch.ops.softmax import SoftmaxAlgorithm, SoftmaxBwdRequest, SoftmaxRequest, evaluate
from dispatch.testing.check import (
    ROUNDOFF,
    GuardedBuffer,
    MadeCase,
    by_numpy,
    checked,
    in_turn,
    normal,
    place,
    poison,
    result_of,
    rounded,
    unit,
    with_outputs,
)
from dispatch.testing.mutations import altered, with_fields

if TYPE_CHECKING:
    from numpy.random import Generator

    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.ops.softmax import AlongAxisRequest
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

Form = tuple[str, tuple[int, ...], int, tuple[int, ...] | None, int, bool]
# Name, shape, axis, order of the axes in memory, the guard around it, and whether the output is the input's memory.
# fmt: off
FORMS: tuple[Form, ...] = (
    ("one element",   (1,),               0, None,            0, False),
    ("vector",        (7,),               0, None,            0, False),
    ("rows",          (5, 13),           -1, None,            0, False),
    ("long rows",     (3, 4099),         -1, None,            0, False),
    ("columns",       (31, 5),            0, None,            0, False),
    ("middle",        (3, 17, 5),         1, None,            0, False),
    ("channels",      (2, 19, 3, 7),      1, None,            0, False),
    ("channels last", (2, 19, 3, 7),      1, (0, 2, 3, 1),    0, False),
    ("five axes",     (2, 3, 5, 7, 2),    2, None,            0, False),
    ("six axes",      (2, 3, 2, 5, 2, 3), 3, None,            0, False),
    ("guarded",       (2, 5, 3, 7),       1, None,            1, False),
    ("guarded, last", (3, 2, 11),        -1, None,            3, False),
    ("transposed",    (11, 6),           -1, (1, 0),          0, False),
    ("axis of one",   (4, 1, 5),          1, None,            0, False),
    ("in place",      (6, 37),           -1, None,            0, True),
    ("no rows",       (0, 5),            -1, None,            0, False),
    ("many rows",     (70001, 3),        -1, None,            0, False),
    ("attention",     (2, 4, 64, 128),   -1, None,            0, False),
)
# fmt: on


def check(
    form: Form, dtype: Dtype, algorithm: SoftmaxAlgorithm, backward: bool, name: str, device: Device, rng: Generator
) -> Check:
    """The check of a case with fresh operands; the logits spread over about ±10, where rounding of x shows."""
    _, shape, axis, order, guard, in_place = form
    spread = 1.0 if algorithm is SoftmaxAlgorithm.FAST else 3.0  # FAST overflows in f16 from e^11.1 on
    chosen: dict[str, Any] = {"axis": axis, "algorithm": algorithm}
    lay = partial(_guarded, device, guard) if guard else partial(place, device, order=order)
    operand = lay(normal(rng, dtype, shape, spread))
    request: AlongAxisRequest = SoftmaxRequest(operand.view, **chosen)
    if backward:
        y = lay(result_of(evaluate, request))
        operand = lay(normal(rng, dtype, shape))
        request = SoftmaxBwdRequest(y.view, operand.view, **chosen)
    return checked(name, with_outputs(request, (lambda _: operand) if in_place else lay), evaluate, bounds)


def _guarded(device: Device, guard: int, values: Array) -> GuardedBuffer:
    """Dense values (cuDNN gets gaps wrong) with `guard` poisoned elements before and after, so at an odd alignment."""
    inside = slice(guard, guard + values.size)
    before = poison(Dtype.of(values.dtype), (values.size + 2 * guard,))
    before[inside] = values.ravel()
    memory = device.array(before)
    return GuardedBuffer(memory[inside].reshape(values.shape), memory, before, (inside,))


def bounds(request: AlongAxisRequest, expected: Results) -> Results:
    """The allowed error of y or dx.

    exp has the error of its rounded argument, |x - max| · u, as much again from scaling the exponent, and 4 units of
    its own (`ex2.approx` has 2^-22). The error of the sum grows like √n, a random walk. The logarithm adds u of itself.
    Where the axis is not the last in memory, cuDNN 9.19 keeps e^x in y's dtype between its two passes: one more
    rounding. For dx the error of a sum of n products grows like √n, then come a product and a difference.
    """
    x, out, dtype = np.asarray(request.first).astype(np.float64), expected["out"], request.first.dtype
    if not x.size:
        return {"out": np.zeros(())}
    u, axis, log = unit(dtype), request.axis, request.algorithm is SoftmaxAlgorithm.LOG
    growth = 4 * np.sqrt(x.shape[axis])
    if isinstance(request, SoftmaxBwdRequest):
        y, dy = x, np.abs(np.asarray(request.dy).astype(np.float64))
        if log:
            size = np.exp(y) * dy.sum(axis=axis, keepdims=True) * (1 + np.abs(y))
        else:
            size = y * (dy + (y * dy).sum(axis=axis, keepdims=True))
        return {"out": rounded((8 + growth) * u * size + 4 * u * dy, out, dtype)}
    span = np.abs(x).max() + np.abs(x.max(axis=axis, keepdims=True) - x)
    relative = (8 + 2 * span + growth) * u
    if log:
        return {"out": rounded(relative + 4 * u * np.abs(out) + 2 * u * np.abs(x), out, dtype)}
    # Along an axis of extent 1 every element is the maximum, and e^0 is exactly 1.
    is_exact = x.shape[axis] == 1 and request.algorithm is not SoftmaxAlgorithm.FAST
    roundoff, tiny = ROUNDOFF[dtype] if dtype in HALF and not by_numpy(request.device) and not is_exact else (0.0, 0.0)
    return {"out": rounded((relative + roundoff) * out + tiny, out, dtype)}


def cases(row: Row) -> list[MadeCase]:
    """Every form, with the algorithms in turn; the plain forms with all algorithms."""
    dtype, backward = row.dtypes[0], row.op == "softmax_bwd"
    return [
        MadeCase(f"{dtype}-{algorithm.name}-{form[0]}", partial(check, form, dtype, algorithm, backward), form[0])
        for form, algorithm in in_turn(FORMS, list(SoftmaxAlgorithm), plain=("rows", "channels", "channels last"))
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
def element(request: AlongAxisRequest) -> Results | None:
    """An element left out of the sum: one with a typical share or, for the gradient, the first dy of each row."""
    if not request.first.size:
        return None
    if isinstance(request, SoftmaxBwdRequest):
        values = np.array(request.dy)
        np.moveaxis(values, request.axis, 0)[0] = 0
        return altered(evaluate, request, dy=values)
    shares = altered(evaluate, request, algorithm=SoftmaxAlgorithm.ACCURATE)["out"]
    lost = np.sort(shares, axis=request.axis)
    heavy = (lost.cumsum(axis=request.axis) < 0.5).sum(axis=request.axis, keepdims=True)
    share = np.take_along_axis(lost, np.minimum(heavy, shares.shape[request.axis] - 1), request.axis)
    if shares.shape[request.axis] < 2 or share.max() < 4 * ROUNDOFF[request.first.dtype][0]:  # the dtype rounds it away
        return None
    right = evaluate(request, EXACT)["out"]
    log = request.algorithm is SoftmaxAlgorithm.LOG
    return {"out": right - np.log1p(-share) if log else right / (1 - share)}


def axis(request: AlongAxisRequest) -> int | None:
    """The next axis instead of the request's."""
    return (request.axis + 1) % request.first.ndim if request.first.ndim > 1 and request.first.size else None


MUTATIONS = {"one element left out": element, "another axis": with_fields(evaluate, axis=axis)}
