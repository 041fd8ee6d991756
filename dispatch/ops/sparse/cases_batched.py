"""The cases of batched products: one A for all, one of each, shared offsets, orders, factors, what is added."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.matrix_choices import Operation
from dispatch.ops.sparse.batched import BatchedSpmmRequest
from dispatch.ops.sparse.form import SparseForm, SparseFormat, shape_of
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["batched_cases"]

SHAPES = ((20, 28), (12, 7), (1, 8), (24, 24))
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0))
ONE, OFFSETS, EACH, NOTHING = ("one A", "one rows", "each", "nothing")
WIDE = 5


def batched_cases(row: Row) -> list[MadeCase]:
    """Each kind of batch in each op."""
    dtype = row.dtypes[0]
    turns = enumerate(product((ONE, OFFSETS, EACH), tuple(Operation), (0, 1)))
    made = [MadeCase(f"{dtype}-{turn}", partial(check, dtype, *one, turn)) for turn, one in turns]
    return [*made, MadeCase(f"{dtype}-nothing", partial(check, dtype, NOTHING, Operation.N, 0, 0))]


def lengths(kind: str, batch: int, m: int, n: int, rng: np.random.Generator) -> Array:
    """How many elements each row of each matrix has, as many in each matrix; a row of none among them."""
    if kind == NOTHING:
        return np.zeros((batch, m), np.int64)
    one = rng.integers(0, min(n, 6) + 1, m)
    one[-1:] = min(n, 3)
    if kind == EACH:
        return np.array([rng.permutation(one) for _ in range(batch)])
    return np.tile(one, (batch, 1))


def check(
    dtype: Dtype, kind: str, trans: Operation, base: int, turn: int, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A request with fresh operands, amid others."""
    (m, n), (alpha, beta) = SHAPES[turn % 4], FACTORS[(turn + turn // 4) % 4]
    batch = (2, 3, 1)[turn % 3]
    counts = lengths(kind, batch, m, n, rng)
    ends = np.concatenate([np.zeros((batch, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
    drawn = [np.sort(rng.permutation(n)[:count]) for line in counts for count in line]
    columns = np.concatenate(drawn).reshape(batch, -1)
    index = np.int64 if turn % 5 == 2 else np.int32
    ends, columns = (ends + base).astype(index), (columns + base).astype(index)
    form = SparseForm(SparseFormat.CSR, (m, n), base)

    def normal(*shape: int) -> Array:
        found = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
        return np.asarray(found.astype(dtype.numpy))

    values = normal(*columns.shape)
    if kind in (ONE, NOTHING):
        values, ends, columns = values[0], ends[0], columns[0]
    elif kind == OFFSETS:
        ends = ends[0]
    long, short = shape_of(form, trans)

    def lay(array: Array, *, by_rows: bool = True) -> GuardedBuffer:
        return place(device, array, None if by_rows else (0, 2, 1), 2)

    parts = {"values": values, "rows": ends, "columns": columns}
    fields: dict[str, Any] = {each: lay(part).view for each, part in parts.items()}
    fields |= {"b": lay(normal(batch, short, WIDE), by_rows=turn % 2 == 0).view, "alpha": alpha, "trans": trans}
    shape, by_rows = (batch, long, WIDE), turn // 2 % 2 == 0
    written: tuple[GuardedBuffer, ...] = ()
    adds = turn % 3 != 0 and kind != NOTHING
    if adds:
        memory = lay(normal(*shape) if beta else poison(dtype, shape), by_rows=by_rows)
        fields |= {"c": memory.view, "beta": beta}
        if turn % 3 == 1:
            fields["out"], written = memory.view, (memory,)
    if "out" not in fields and turn % 4 != 3:
        memory = lay(poison(dtype, shape), by_rows=by_rows)
        fields["out"], written = memory.view, (memory,)
    request = BatchedSpmmRequest(**fields, form=form)
    expected = evaluate(request, EXACT)
    sizes: dict[str, Any] = {
        each: np.abs(np.asarray(tensor)) for each, tensor, _ in request.tensors() if each in ("values", "b", "c")
    }
    factors = {each: abs(request.factor(each)) for each in ("alpha", "beta")}
    with np.errstate(all="ignore"):
        size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    unit = ROUNDOFF[dtype][0] * (4 if dtype.is_complex else 1)
    bound = rounded((max(m, n) + 4) * unit * size, expected["out"], dtype)
    return Check(name, request, expected, {"out": np.asarray(bound)}, written)
