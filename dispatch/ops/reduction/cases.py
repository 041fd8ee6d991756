"""The test cases of the reduction rows, and the allowed errors relative to the float64 reference.

Tests parametrize over `cases(row)` and run `case.check(device, rng)`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import I8
from dispatch.ops.reduction import SUMS, ReduceOp, ReduceRequest, evaluate, rows_of, sums
from dispatch.ops.reduction.of_one import of_one
from dispatch.ops.reduction.request import WITH_INDICES
from dispatch.testing.check import MadeCase, checked, distinct, place, rounded, unit, with_outputs
from dispatch.testing.mutations import typical, with_fields

if TYPE_CHECKING:
    from dispatch.core.host_plan import Results
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype
    from dispatch.testing.check import Check

__all__ = ["MUTATIONS", "cases"]

Form = tuple[str, tuple[int, ...], tuple[int, ...] | int | None, tuple[int, ...] | None, int, bool]
# Name, shape, axes, order of the axes in memory, gap after every axis, and keepdims.
# fmt: off
FORMS: tuple[Form, ...] = (
    ("one element",   (1,),               None,      None,         0, False),
    ("vector",        (1031,),            None,      None,         0, False),
    ("rows",          (7, 131),           -1,        None,         0, False),
    ("columns",       (131, 7),           0,         None,         0, True),
    ("middle",        (3, 17, 5),         1,         None,         0, False),
    ("two of four",   (2, 7, 3, 5),       (1, 3),    None,         0, True),
    ("channels last", (2, 19, 3, 7),      (0, 2, 3), (0, 2, 3, 1), 0, False),
    ("six axes",      (2, 3, 2, 5, 2, 3), (0, 2, 4), None,         0, False),
    ("gaps",          (2, 5, 3, 7),       (0, 2),    None,         1, True),
    ("transposed",    (11, 6),            0,         (1, 0),       0, False),
    ("no row",        (0, 5),             1,         None,         0, False),
    ("long",          (3, 9001),          1,         None,         0, False),
    ("many",          (20011, 3),         1,         None,         0, False),
    ("axis of one",   (5, 1, 3),          1,         None,         0, False),
)
# Of one element each.
FORMS_OF_ONE: tuple[Form, ...] = (
    ("one number",    (1,),               None,      None,         0, False),
    ("no axis",       (5, 7),             (),        None,         0, False),
    ("batch of one",  (1, 131),           0,         None,         0, False),
    ("first of four", (1, 7, 3, 5),       0,         None,         0, True),
    ("two of four",   (3, 1, 5, 1),       (1, 3),    None,         0, False),
    ("channels last", (2, 19, 1, 1),      (2, 3),    (0, 2, 3, 1), 0, False),
    ("six axes",      (2, 3, 1, 5, 2, 3), 2,         None,         0, False),
    ("gaps",          (1, 5, 3, 7),       0,         None,         1, True),
    ("transposed",    (11, 1, 6),         1,         (2, 1, 0),    0, False),
    ("no row",        (0, 1),             1,         None,         0, False),
    ("many",          (20011, 1, 3),      1,         None,         0, False),
    ("axis of two",   (5, 2, 3),          1,         None,         0, False),
)
# fmt: on


def check(
    form: Form,
    dtypes: tuple[Dtype, ...],
    reduce: ReduceOp,
    indices: bool,
    name: str,
    device: Device,
    rng: np.random.Generator,
) -> Check:
    """A case with fresh operands: products stay near 1, and an element with an index is unique."""
    _, shape, axes, order, gap, keepdims = form
    if reduce in (ReduceOp.MUL, ReduceOp.MUL_NO_ZEROS):
        values = 1 + rng.standard_normal(shape) / 4 / np.sqrt(max(int(np.prod(shape)), 1))
        if reduce is ReduceOp.MUL_NO_ZEROS and values.ndim and values.size:
            values.ravel()[:: max(values.size // 3, 2)] = 0
        drawn = values.astype(dtypes[0].numpy)
        if dtypes[0] is I8:
            drawn = rng.choice(np.array([-1, 1, 1 if reduce is ReduceOp.MUL else 0], np.int8), shape)
    else:
        drawn = distinct(rng, dtypes[0], shape)
        if reduce is ReduceOp.AMAX and indices:  # magnitudes differ: equal ones have no unique index
            drawn = np.where(drawn > 0, drawn, drawn / 1024).astype(drawn.dtype) if drawn.dtype.kind != "i" else drawn
    x = place(device, drawn, order, gap)
    chosen: dict[str, Any] = {"reduce": reduce, "keepdims": keepdims, "indices": indices}
    request = ReduceRequest(x.view, axes, out_dtype=dtypes[1], **chosen)
    # Indices, and the outputs with them, are only supported in dense tensors.
    laid = with_outputs(request, partial(place, device, gap=0 if indices else gap))
    return checked(name, laid, evaluate, bounds)


def bounds(request: ReduceRequest, expected: Results) -> Results:
    """The allowed errors; indices are exact."""
    return {"out": bound(request, expected), "index": np.zeros(())}


def bound(request: ReduceRequest, expected: Results) -> Array:
    """The allowed error: sums and products of n elements grow like √n, as random walks; a chosen element is exact."""
    out, dtype = expected["out"], request.outputs()["out"].dtype
    if not out.size or request.reduce in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AMAX):
        return rounded(np.zeros(out.shape), out, dtype)
    rows = rows_of(request, EXACT)
    walk = (4 + 4 * np.sqrt(rows.shape[-1])) * unit(request.x.dtype)
    if request.reduce in (ReduceOp.MUL, ReduceOp.MUL_NO_ZEROS):
        return rounded(walk * np.abs(out), out, dtype)
    size = np.abs(rows).sum(axis=-1).reshape(out.shape)
    if request.reduce is ReduceOp.AVG:
        size = size / rows.shape[-1]
    return rounded(walk * (np.abs(out) if request.reduce is ReduceOp.NORM2 else size), out, dtype)


def cases(row: Row) -> list[MadeCase]:
    """Every form, with alternating reductions, and the plain forms with all reductions and their indices."""
    summing = sums in row.rules
    ops = [op for op in ReduceOp if not summing or op in SUMS]
    combinations: list[tuple[Form, ReduceOp, bool]] = []
    for number, form in enumerate(FORMS_OF_ONE if of_one in row.rules else FORMS):
        for turn, reduce in enumerate(ops):
            if summing or form[0] in ("rows", "two of four") or turn % 3 == number % 3:
                combinations.append((form, reduce, False))
        chosen = WITH_INDICES if form[0] in ("rows", "two of four") else (WITH_INDICES[number % 3],)
        combinations += [(form, reduce, True) for reduce in chosen if not form[4] and not summing]
    dtypes = f"{row.dtypes[0]}-{row.dtypes[1]}"
    return [
        MadeCase(
            f"{dtypes}-{reduce.name}{'-indices' if indices else ''}-{form[0]}",
            partial(check, form, row.dtypes, reduce, indices),
            form[0],
        )
        for form, reduce, indices in combinations
    ]


# -- wrong results that every case must reject: see `dispatch/testing/mutations.py` --------------------
def element(request: ReduceRequest) -> Array | None:
    """One element left out: the chosen one, or a typical one of a sum."""
    if not request.x.size:
        return None
    values = np.array(request.x)
    exact = values.astype(np.float64).ravel()
    neutral = 1 if request.reduce in (ReduceOp.MUL, ReduceOp.MUL_NO_ZEROS) else 0
    if request.reduce in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AMAX):
        index = int(np.argmin(exact) if request.reduce is ReduceOp.MIN else np.argmax(exact))
        index = int(np.argmax(np.abs(exact))) if request.reduce is ReduceOp.AMAX else index
    else:
        index = typical(np.abs(exact - neutral))
    values.flat[index] = neutral
    return values


def index(request: ReduceRequest) -> Results | None:
    """The index of the neighbour."""
    if not request.indices or not request.x.size:
        return None
    return {"index": evaluate(request, EXACT)["index"] + np.uint32(1)}


MUTATIONS = {"one element left out": with_fields(evaluate, x=element), "the place beside": index}
