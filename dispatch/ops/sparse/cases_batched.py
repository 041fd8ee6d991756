"""The cases of batched products: one A for all, one of each, one pattern, one rows, orders, factors, what is added."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

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

__all__ = ["FACTORS", "KINDS", "NOTHING", "SHAPES", "Stack", "batched_cases", "stack_of"]

SHAPES = ((20, 28), (12, 7), (1, 8), (24, 24))
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0))
ONE, OFFSETS, PATTERN, EACH, NOTHING = ("one A", "one rows", "one pattern", "each", "nothing")
KINDS = (ONE, OFFSETS, PATTERN, EACH)
WIDE = 5


class Stack(NamedTuple):
    """The indices of a batch of matrices with as many elements each; parts that are for all have no axis of it.

    `shape` is that of the values.
    """

    form: SparseForm
    rows: Array
    columns: Array
    shape: tuple[int, ...]


def batched_cases(row: Row) -> list[MadeCase]:
    """Each kind of batch in each op."""
    dtype, of = row.dtypes[0], SparseFormat.COO if row.variant == "COO" else SparseFormat.CSR
    turns = enumerate(product(KINDS, tuple(Operation), (0, 1)))
    made = [MadeCase(f"{dtype}-{turn}", partial(check, dtype, of, *one, turn)) for turn, one in turns]
    return [*made, MadeCase(f"{dtype}-nothing", partial(check, dtype, of, NOTHING, Operation.N, 0, 0))]


def stack_of(form: SparseForm, kind: str, batch: int, index: Any, rng: np.random.Generator) -> Stack:
    """Draw a batch of matrices of a form."""
    m, n = form.shape
    lines, across = (n, m) if form.format is SparseFormat.CSC else (m, n)
    counts = lengths(kind, batch, lines, across, rng)
    ends = np.concatenate([np.zeros((batch, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
    drawn = [np.sort(rng.permutation(across)[:count]) for line in counts for count in line]
    minor = np.concatenate(drawn).reshape(batch, -1)
    major = ends
    if form.format is SparseFormat.COO:
        major = np.array([np.repeat(np.arange(lines), own) for own in counts]).reshape(batch, -1)
    shape: tuple[int, ...] = minor.shape
    if kind in (ONE, PATTERN, NOTHING):
        minor = minor[0]
    if kind != EACH:
        major = major[0]
    if kind in (ONE, NOTHING):
        shape = shape[1:]
    major, minor = (major + form.base).astype(index), (minor + form.base).astype(index)
    rows, columns = (minor, major) if form.format is SparseFormat.CSC else (major, minor)
    return Stack(form, rows, columns, shape)


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
    dtype: Dtype,
    of: SparseFormat,
    kind: str,
    trans: Operation,
    base: int,
    turn: int,
    name: str,
    device: Device,
    rng: np.random.Generator,
) -> Check:
    """A request with fresh operands, amid others."""
    (m, n), (alpha, beta) = SHAPES[turn % 4], FACTORS[(turn + turn // 4) % 4]
    batch = (2, 3, 1)[turn % 3]
    form = SparseForm(of, (m, n), base)
    stack = stack_of(form, kind, batch, np.int64 if turn % 5 == 2 else np.int32, rng)

    def normal(*shape: int) -> Array:
        found = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
        return np.asarray(found.astype(dtype.numpy))

    long, short = shape_of(form, trans)

    def lay(array: Array, *, by_rows: bool = True) -> GuardedBuffer:
        return place(device, array, None if by_rows else (0, 2, 1), 2)

    parts = {"values": normal(*stack.shape), "rows": stack.rows, "columns": stack.columns}
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
