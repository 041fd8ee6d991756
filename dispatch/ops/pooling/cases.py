"""The cases that the pooling rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import I8
from dispatch.ops.pooling import PoolingBwdRequest, PoolingMode, PoolingRequest, Steps, backward, evaluate
from dispatch.testing.check import (
    ROUNDOFF,
    Check,
    GuardedBuffer,
    by_numpy,
    check_of,
    distinct,
    normal,
    place,
    result_of,
    rounded,
    unit,
)
from dispatch.testing.mutations import changed, with_fields

if TYPE_CHECKING:
    from dispatch.device.layout import Array

    Results = dict[str, Array]
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "PoolingCase", "cases"]

Form = tuple[str, tuple[int, ...], Steps, Steps | None, Steps, bool, int]
# Name, shape, window, stride, padding, whether the channels come last, and the gap behind every axis.
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


@dataclass(frozen=True)
class PoolingCase:
    """One request, by all that is chosen about it but the numbers in it."""

    name: str
    shape: tuple[int, ...]
    window: Steps
    stride: Steps | None
    padding: Steps
    last: bool
    gap: int
    dtype: Dtype
    mode: PoolingMode
    backward: bool

    @property
    def id(self) -> str:
        return f"{self.dtype}-{self.mode.name}-{self.name}"

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands; no two elements of a window are equal, so that its largest is one element."""
        fields: dict[str, Any] = {"mode": self.mode, "stride": self.stride, "padding": self.padding}
        lay, drawn = partial(self._lay, device), {"x": distinct(rng, self.dtype, self.shape)}
        if not self.backward:
            return check_of(self.id, PoolingRequest, drawn, lay, evaluate, self._bound, window=self.window, **fields)
        y = result_of(evaluate, PoolingRequest(lay(drawn["x"]).view, self.window, **fields))
        drawn |= {"y": y, "dy": normal(rng, self.dtype, y.shape)}
        return check_of(self.id, PoolingBwdRequest, drawn, lay, evaluate, self._bound, window=self.window, **fields)

    def _lay(self, device: Device, values: Array) -> GuardedBuffer:
        order = (0, *range(2, values.ndim), 1) if self.last else None
        return place(device, values, order, self.gap)

    def _bound(self, request: PoolingRequest | PoolingBwdRequest, expected: Array) -> Array:
        """How far a result may be off: a sum over a window, or over the windows that an element is in.

        For MAX, cuDNN 9.19 adds up gradients in dx itself, in any order: each addition rounds to its dtype.
        """
        terms = float(np.prod(request.windows.window))
        u = (4 + 2 * np.sqrt(terms)) * unit(self.dtype)
        if isinstance(request, PoolingBwdRequest):
            size = backward(request, np.abs(np.asarray(request.dy).astype(np.float64)))
            error = np.asarray(u * size)
            if self.mode is PoolingMode.MAX and not by_numpy(request.device):
                additions = np.maximum(backward(request, np.ones(request.dy.shape)) - 1, 0)
                error = error + ROUNDOFF[self.dtype][0] * additions * size
            return rounded(error, expected, self.dtype)
        if self.mode.is_max:
            return np.zeros(())
        largest = np.abs(np.asarray(request.x).astype(np.float64)).max(initial=0)
        return rounded(np.asarray(u * largest), expected, self.dtype)


def cases(row: Row) -> list[PoolingCase]:
    """Every form in turn with the modes, and the plain ones with all of them."""
    modes = list(PoolingMode)
    found = []
    for number, form in enumerate(FORMS):
        for turn, mode in enumerate(modes):
            if row.dtypes[0] is I8 and not mode.is_max:
                continue
            if form[0] in ("overlapping", "channels last", "cubes, overlap", "line") or turn == number % len(modes):
                found.append(PoolingCase(*form, row.dtypes[0], mode, row.op == "pooling_bwd"))
    return found


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------


def tap(request: PoolingRequest | PoolingBwdRequest) -> Results | None:
    """One element of one image left out: where it is the largest of its window, or of dY."""
    if not request.x.size:
        return None
    tensor = request.dy if isinstance(request, PoolingBwdRequest) else request.x
    values = np.asarray(tensor).copy()
    place = values.size // 2
    if isinstance(request, PoolingRequest) and request.mode.is_max:
        place = int(np.argmax(values.astype(np.float64)))
        values.flat[place] = np.asarray(-100).astype(values.dtype)
    else:
        values.flat[place] = 0
    if isinstance(request, PoolingBwdRequest):
        return evaluate(replace(request, dy=changed(tensor, values)), EXACT)
    return evaluate(replace(request, x=changed(tensor, values)), EXACT)


INCLUDE, EXCLUDE = PoolingMode.AVERAGE_COUNT_INCLUDE_PADDING, PoolingMode.AVERAGE_COUNT_EXCLUDE_PADDING
OTHER_COUNT = {INCLUDE: EXCLUDE, EXCLUDE: INCLUDE}
MUTATIONS = {
    "one element left out": tap,
    "padding counted otherwise": with_fields(evaluate, mode=lambda request: OTHER_COUNT.get(request.mode)),
}
