"""The test cases of the rows of `attention_merge`, the allowed errors, and the wrong results to reject."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import F32
from dispatch.ops.attention_merge import AttentionMergeRequest, evaluate, weights
from dispatch.testing.check import MadeCase, checked, normal, place, rounded, unit
from dispatch.testing.mutations import of_operand

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

BY_ROW = (0, 2, 1, 3)
# Name, shape, order of axes in memory, gap after every axis, whether out is a, and the number of rows without keys.
# fmt: off
FORMS: tuple[Any, ...] = (
    ("primes",     (3, 2, 5, 7),      None,   0, False, 0),
    ("vectors",    (2, 3, 17, 64),    BY_ROW, 0, False, 0),
    ("gaps",       (2, 3, 5, 12),     BY_ROW, 1, False, 0),
    ("in place",   (2, 2, 9, 32),     None,   4, True,  0),
    ("nothing seen", (2, 2, 8, 16),   None,   0, False, 3),
    ("one",        (1, 1, 1, 1),      None,   0, False, 0),
    ("nothing",    (2, 3, 0, 8),      None,   0, False, 0),
    ("large",      (2, 8, 130, 128),  BY_ROW, 0, False, 0),
)
# fmt: on


def check(form: Any, dtypes: tuple[Dtype, ...], name: str, device: Device, rng: np.random.Generator) -> Check:
    """A case with fresh operands; the statistics differ like those of unequal numbers of keys."""
    _, shape, order, gap, in_place, unseen = form
    lay = partial(place, device, order=order, gap=gap)
    a, b = (lay(normal(rng, dtype, shape)) for dtype in dtypes[:2])
    stats = [normal(rng, F32, (*shape[:-1], 1), 2.0) for _ in range(2)]
    for number, side in enumerate(stats):  # in the first rows neither side has keys, in the next ones one side has
        side.reshape(-1)[: unseen * (number + 1)] = -np.inf
    one, other = (place(device, each) for each in stats)
    out = a if in_place and dtypes[0] is dtypes[2] else lay(normal(rng, dtypes[2], shape))
    s = place(device, normal(rng, F32, (*shape[:-1], 1)))
    request = AttentionMergeRequest(a.view, one.view, b.view, other.view, out=out.view, stats_out=s.view)
    return checked(name, (request, (out, s)), evaluate, bounds)


def bounds(request: AttentionMergeRequest, expected: Results) -> Results:
    """The allowed errors: an exponential has one of (4 + |its argument|) · u, their sum and quotient add three."""
    one, other, stats = weights(request, np.dtype(np.float64))
    a, b, p, q = (np.abs(np.asarray(t).astype(np.float64)) for t in request_tensors(request))
    p, q = (np.where(np.isinf(each), 0, each) for each in (p, q))
    far = 10 + p + q
    size = np.where(one == 0, 0, one * a) + np.where(other == 0, 0, other * b)
    dtype: Any = request.dtypes[2]
    off = 4 * unit(F32) * (far + np.where(np.isinf(stats), 0, np.abs(stats)))
    return {
        "out": rounded(4 * unit(F32) * far * size, expected["out"], dtype),
        "stats_out": rounded(off, expected["stats_out"], F32),
    }


def request_tensors(request: AttentionMergeRequest) -> tuple[Any, ...]:
    """The operands, statistics last."""
    return request.a, request.b, request.a_stats, request.b_stats


def cases(row: Row) -> list[MadeCase]:
    """Every form, with the dtypes of the row."""
    dtypes: Any = row.dtypes
    name = "-".join(map(str, dtypes))
    return [MadeCase(f"{name}-{form[0]}", partial(check, form, dtypes), form[0]) for form in FORMS]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
FEW = 32  # elements: with fewer, the two results may agree


def _exchanged(request: AttentionMergeRequest) -> Results | None:
    if request.a.size < FEW:
        return None
    return evaluate(request.replace(a_stats=request.b_stats, b_stats=request.a_stats), np.dtype(np.float64))


def _unweighted(request: AttentionMergeRequest) -> Results | None:
    if request.a.size < FEW:
        return None
    right = evaluate(request, np.dtype(np.float64))
    a, b, *_ = (np.asarray(t).astype(np.float64) for t in request_tensors(request))
    return {**right, "out": (a + b) / 2}


MUTATIONS = {
    "statistics exchanged": _exchanged,
    "the mean": _unweighted,
    "b of the next row": of_operand(evaluate, "b", lambda b: np.roll(b, 1, axis=2) if b.shape[2] > 1 else None),
    "statistics of the next row": of_operand(
        evaluate, "b_stats", lambda s: np.roll(s, 1, axis=2) if s.shape[2] > 1 else None
    ),
}
