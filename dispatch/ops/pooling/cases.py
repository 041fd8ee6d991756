"""The test cases of the pooling rows, and the allowed errors relative to the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import I8, member
from dispatch.ops.pooling import PoolingBwdRequest, PoolingMode, PoolingRequest, Steps, backward, evaluate
from dispatch.testing.check import (
    ROUNDOFF,
    MadeCase,
    by_numpy,
    checked,
    distinct,
    in_turn,
    normal,
    place,
    result_of,
    rounded,
    unit,
    with_outputs,
)
from dispatch.testing.mutations import altered, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.ops.pooling import WindowedRequest
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

Form = tuple[str, tuple[int, ...], Steps, Steps | None, Steps, bool, int]
# Name, shape, window, stride, padding, whether the channels come last, and the gap after every axis.
# fmt: off
FORMS: tuple[Form, ...] = (
    ("one element",     (1, 1, 1, 1),       1,         None,      0,         False, 0),
    ("halves",          (2, 3, 8, 6),       2,         None,      0,         False, 0),
    ("overlapping",     (2, 5, 13, 11),     3,         2,         1,         False, 0),
    ("channels last",   (2, 16, 12, 14),    3,         2,         1,         True,  0),
    ("primes, last",    (3, 7, 11, 5),      (3, 2),    (2, 1),    (1, 0),    True,  0),
    ("uneven",          (1, 3, 17, 9),      (5, 2),    (3, 4),    (2, 1),    False, 0),
    ("left over",       (1, 2, 10, 10),     3,         3,         0,         False, 0),
    ("sparse",          (1, 2, 12, 12),     2,         5,         0,         False, 0),
    ("whole image",     (2, 4, 7, 7),       7,         None,      0,         False, 0),
    ("gaps",            (2, 3, 9, 7),       2,         1,         1,         False, 1),
    ("cubes",           (2, 3, 6, 8, 4),    2,         None,      0,         False, 0),
    ("cubes, overlap",  (1, 5, 7, 5, 9),    (3, 2, 3), (2, 1, 2), (1, 0, 1), False, 0),
    ("cubes, last",     (2, 8, 6, 5, 7),    3,         2,         1,         True,  0),
    ("line",            (3, 5, 19),         3,         2,         1,         False, 0),
    ("line, last",      (2, 6, 10),         2,         None,      0,         True,  0),
    ("no image",        (0, 3, 8, 8),       2,         None,      0,         False, 0),
    ("as in a network", (4, 64, 56, 56),    3,         2,         1,         True,  0),
)
# fmt: on


def check(
    form: Form, dtype: Dtype, mode: PoolingMode, backward: bool, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A case with fresh operands; no two elements of a window are equal, so that only one is the largest."""
    _, shape, window, stride, padding, last, gap = form
    lay = partial(place, device, order=(0, *range(2, len(shape)), 1) if last else None, gap=gap)
    x = lay(distinct(rng, dtype, shape))
    fields: dict[str, Any] = {"mode": mode, "stride": stride, "padding": padding}
    request: WindowedRequest = PoolingRequest(x.view, window, **fields)
    if backward:
        y = lay(result_of(evaluate, request))
        dy = lay(normal(rng, dtype, y.view.shape))
        request = PoolingBwdRequest(x.view, y.view, dy.view, window, **fields)
    return checked(name, with_outputs(request, lay), evaluate, bounds)


def bounds(request: WindowedRequest, expected: Results) -> Results:
    """The allowed error: that of a sum over a window, or over the windows that contain an element.

    For MAX, cuDNN 9.19 adds up gradients in dx itself, in any order: each addition rounds to its dtype.
    """
    dtype, terms = request.x.dtype, float(np.prod(request.windows.window))
    u = (4 + 2 * np.sqrt(terms)) * unit(dtype)
    if isinstance(request, PoolingBwdRequest):
        size = backward(request, np.abs(np.asarray(request.dy).astype(np.float64)))
        error = np.asarray(u * size)
        if request.mode is PoolingMode.MAX and not by_numpy(request.device):
            additions = np.maximum(backward(request, np.ones(request.dy.shape)) - 1, 0)
            error = error + ROUNDOFF[dtype][0] * additions * size
    elif member(request.mode).is_max:
        return {"out": np.zeros(())}
    else:
        error = np.asarray(u * np.abs(np.asarray(request.x).astype(np.float64)).max(initial=0))
    return {"out": rounded(error, expected["out"], dtype)}


def cases(row: Row) -> list[MadeCase]:
    """Every form, with alternating modes, and the plain forms with all modes."""
    dtype, backward = row.dtypes[0], row.op == "pooling_bwd"
    return [
        MadeCase(f"{dtype}-{mode.name}-{form[0]}", partial(check, form, dtype, mode, backward), form[0])
        for form, mode in in_turn(FORMS, list(PoolingMode), ("overlapping", "channels last", "cubes, overlap", "line"))
        if dtype is not I8 or mode.is_max
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
def tap(request: WindowedRequest) -> Results | None:
    """One element of one image left out: the largest of its window, or of dY."""
    if not request.x.size:
        return None
    name = request.reads[-1]
    values = np.array(getattr(request, name))
    if name == "x" and member(request.mode).is_max:
        values.flat[int(np.argmax(values.astype(np.float64)))] = np.asarray(-100).astype(values.dtype)
    else:
        values.flat[values.size // 2] = 0
    return altered(evaluate, request, **{name: values})


def counting(request: WindowedRequest) -> PoolingMode | None:
    """The average mode that counts the padding if the request's mode does not, and vice versa."""
    kinds = (PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING, PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING)
    return kinds[request.mode is kinds[0]] if request.mode in kinds and request.x.size else None


MUTATIONS = {"one element left out": tap, "padding counted otherwise": with_fields(evaluate, mode=counting)}
