"""The cases that the softmax rows are tried with, and how far a result may be from the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import HALF
from dispatch.ops.softmax import SoftmaxAlgorithm, SoftmaxBwdRequest, SoftmaxRequest, evaluate
from dispatch.testing.check import (
    ROUNDOFF,
    Check,
    GuardedBuffer,
    by_numpy,
    check_of,
    normal,
    place,
    poison,
    result_of,
    rounded,
    unit,
)
from dispatch.testing.mutations import changed, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["MUTATIONS", "SoftmaxCase", "cases"]

# Name, shape, axis, order of the axes in memory, the guard around it, and whether the output is the input's memory.
# fmt: off
FORMS = (
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


@dataclass(frozen=True)
class SoftmaxCase:
    """One request, by all that is chosen about it but the numbers in it."""

    name: str
    shape: tuple[int, ...]
    axis: int
    order: tuple[int, ...] | None
    guard: int
    in_place: bool
    dtype: Dtype
    algorithm: SoftmaxAlgorithm
    backward: bool

    @property
    def id(self) -> str:
        return f"{self.dtype}-{self.algorithm.name}-{self.name}"

    def check(self, device: Device, rng: np.random.Generator) -> Check:
        """The case with fresh operands; the logits spread over ±10 or so, where rounding of x shows."""
        spread = 1.0 if self.algorithm is SoftmaxAlgorithm.FAST else 3.0  # FAST overflows in f16 from e^11.1 on
        fields: dict[str, Any] = {"axis": self.axis, "algorithm": self.algorithm}
        lay, x = partial(self._lay, device), normal(rng, self.dtype, self.shape, spread)
        if not self.backward:
            in_place = "x" if self.in_place else ""
            return check_of(self.id, SoftmaxRequest, {"x": x}, lay, evaluate, bound_forward, in_place, **fields)
        y = result_of(evaluate, SoftmaxRequest(lay(x).view, **fields))
        drawn, in_place = {"y": y, "dy": normal(rng, self.dtype, self.shape)}, "dy" if self.in_place else ""
        return check_of(self.id, SoftmaxBwdRequest, drawn, lay, evaluate, bound_backward, in_place, **fields)

    def _lay(self, device: Device, values: Array) -> GuardedBuffer:
        """Dense, for cuDNN gets gaps wrong; with `guard` poisoned elements before and behind, and so at an odd one."""
        if not self.guard:
            return place(device, values, self.order)
        inside = slice(self.guard, self.guard + values.size)
        kept = poison(self.dtype, (values.size + 2 * self.guard,))
        kept[inside] = values.ravel()
        whole = device.array(kept)
        return GuardedBuffer(whole[inside].reshape(values.shape), whole, kept, (inside,))


def bound_forward(request: SoftmaxRequest, y: Array) -> Array:
    """How far y may be off.

    A power of e is off by the rounding of its argument, |x - largest| · u and as much again in the exponent's scaling,
    and by 4 units of its own (`ex2.approx` has 2^-22); the sum walks like √n; the logarithm adds u of itself. Where the
    axis is not the last in memory, cuDNN 9.19 keeps e^x in y's own dtype between its two passes: a rounding more.
    """
    x = np.asarray(request.x).astype(np.float64)
    if not x.size:
        return np.zeros(())
    u = unit(request.x.dtype)
    span = np.abs(x).max() + np.abs(x.max(axis=request.axis, keepdims=True) - x)
    relative = (8 + 2 * span + 4 * np.sqrt(x.shape[request.axis])) * u
    if request.algorithm is SoftmaxAlgorithm.LOG:
        return rounded(relative + 4 * u * np.abs(y) + 2 * u * np.abs(x), y, request.x.dtype)
    kept, tiny = 0.0, 0.0
    if request.x.dtype in HALF and not by_numpy(request.device) and not _one(request):
        kept, tiny = ROUNDOFF[request.x.dtype]
    return rounded((relative + kept) * y + tiny, y, request.x.dtype)


def _one(request: SoftmaxRequest) -> bool:
    """Whether each element is the largest of its own, and e^0 is 1 in any dtype."""
    return request.x.shape[request.axis] == 1 and request.algorithm is not SoftmaxAlgorithm.FAST


def bound_backward(request: SoftmaxBwdRequest, dx: Array) -> Array:
    """How far dx may be off: a sum of n products walks like √n; then a product and a difference."""
    y, dy = (np.asarray(tensor).astype(np.float64) for tensor in (request.y, request.dy))
    if not y.size:
        return np.zeros(())
    u = unit(request.y.dtype)
    walk = (8 + 4 * np.sqrt(y.shape[request.axis])) * u
    if request.algorithm is SoftmaxAlgorithm.LOG:
        factor = np.exp(y)
        size = factor * np.abs(dy).sum(axis=request.axis, keepdims=True) * (1 + np.abs(y))
    else:
        factor = y
        size = y * (np.abs(dy) + (y * np.abs(dy)).sum(axis=request.axis, keepdims=True))
    return rounded(walk * size + 4 * u * np.abs(dy), dx, request.y.dtype)


def cases(row: Row) -> list[SoftmaxCase]:
    """Every form in turn with the algorithms, and the plain forms with all of them."""
    algorithms = list(SoftmaxAlgorithm)
    found = []
    for number, form in enumerate(FORMS):
        for turn, algorithm in enumerate(algorithms):
            if form[0] in ("rows", "channels", "channels last") or turn == number % len(algorithms):
                found.append(SoftmaxCase(*form, row.dtypes[0], algorithm, row.op == "softmax_bwd"))
    return found


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------


def element(request: SoftmaxRequest | SoftmaxBwdRequest) -> Results | None:
    """An element left out of the sum: of those whose share is a typical one, or of dY the first of each row."""
    if not request.x.size if isinstance(request, SoftmaxRequest) else not request.y.size:
        return None
    if isinstance(request, SoftmaxBwdRequest):
        values = np.asarray(request.dy).copy()
        np.moveaxis(values, request.axis, 0)[0] = 0
        return evaluate(replace(request, dy=changed(request.dy, values)), EXACT)
    shares = evaluate(replace(request, algorithm=SoftmaxAlgorithm.ACCURATE), EXACT)["out"]
    lost = np.sort(shares, axis=request.axis)
    heavy = (lost.cumsum(axis=request.axis) < 0.5).sum(axis=request.axis, keepdims=True)
    share = np.take_along_axis(lost, np.minimum(heavy, shares.shape[request.axis] - 1), request.axis)
    if shares.shape[request.axis] < 2 or share.max() < 4 * ROUNDOFF[request.x.dtype][0]:  # the dtype rounds it away
        return None
    right = evaluate(request, EXACT)["out"]
    log = request.algorithm is SoftmaxAlgorithm.LOG
    return {"out": right - np.log1p(-share) if log else right / (1 - share)}


def beside(request: SoftmaxRequest | SoftmaxBwdRequest) -> int | None:
    """The axis beside, where there is one."""
    rank = len(request.layout_of("out").shape)
    return (request.axis + 1) % rank if rank > 1 else None


MUTATIONS = {"one element left out": element, "another axis": with_fields(evaluate, axis=beside)}
