"""The cases of batched products: shared A, separate A, shared pattern, shared rows, orders, factors, added operands."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.core.matrix_choices import Operation
from dispatch.keys import F32, HALF
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

__all__ = ["FACTORS", "KINDS", "NOTHING", "SHAPES", "BatchIndices", "batched_cases", "draw_batch_indices"]

SHAPES = ((20, 28), (12, 7), (1, 8), (24, 24))
FACTORS = ((1.0, 0.0), (0.75, -1.5), (0.0, 0.5), (-2.0, 1.0))
ONE, OFFSETS, PATTERN, EACH, NOTHING = ("one A", "one rows", "one pattern", "each", "nothing")
KINDS = (ONE, OFFSETS, PATTERN, EACH)
WIDE = 5


class BatchIndices(NamedTuple):
    """The indices of a batch of matrices with equal numbers of elements; shared parts have no batch axis.

    `shape` is that of the values.
    """

    form: SparseForm
    rows: Array
    columns: Array
    shape: tuple[int, ...]


class Form(NamedTuple):
    """A case: how the matrices are stored and which parts are shared, the operation, and the requested library."""

    format: SparseFormat
    kind: str
    trans: Operation
    base: int
    turn: int
    library: str | None


def batched_cases(row: Row) -> list[MadeCase]:
    """Each kind of batch in each op."""
    dtypes, library = row.dtypes, row.stands_for or row.library
    is_own, listed = library == "own", []
    named = SparseFormat.BSR if row.variant == "blocks" else SparseFormat.named(row.variant)
    for turn, (kind, trans, base) in enumerate(product(KINDS, tuple(Operation), (0, 1))):
        contiguous = SparseFormat.CSR if trans is Operation.N else SparseFormat.CSC  # rows of op(A)
        of = named or (contiguous if is_own else SparseFormat.CSR)
        # For requests that this library's kernels also support, cuSPARSE must be named.
        requested = None if is_own or (turn % 4 == 1 and of is not SparseFormat.BSR) else library
        one = Form(of, kind, Operation.N if of is SparseFormat.BSR else trans, base, turn, requested)
        listed.append(MadeCase(f"{dtypes[0]}-{turn}", partial(check, dtypes, one)))
    nothing = Form(named or SparseFormat.CSR, NOTHING, Operation.N, 0, 0, None if is_own else library)
    return [*listed, MadeCase(f"{dtypes[0]}-nothing", partial(check, dtypes, nothing))]


def draw_batch_indices(form: SparseForm, kind: str, batch: int, index: Any, rng: np.random.Generator) -> BatchIndices:
    """Draw a batch of matrices of a form."""
    m, n = (extent // step for extent, step in zip(form.shape, form.block, strict=True))
    lines, across = (n, m) if form.format is SparseFormat.CSC else (m, n)
    counts = row_lengths(kind, batch, lines, across, rng)
    ends = np.concatenate([np.zeros((batch, 1), np.int64), np.cumsum(counts, axis=1)], axis=1)
    drawn = [np.sort(rng.permutation(across)[:count]) for line in counts for count in line]
    minor = np.concatenate(drawn).reshape(batch, -1)
    major = ends
    if form.format is SparseFormat.COO:
        major = np.array([np.repeat(np.arange(lines), own) for own in counts]).reshape(batch, -1)
    shape: tuple[int, ...] = (*minor.shape, *(form.block if form.format is SparseFormat.BSR else ()))
    if kind in (ONE, PATTERN, NOTHING):
        minor = minor[0]
    if kind != EACH:
        major = major[0]
    if kind in (ONE, NOTHING):
        shape = shape[1:]
    major, minor = (major + form.base).astype(index), (minor + form.base).astype(index)
    rows, columns = (minor, major) if form.format is SparseFormat.CSC else (major, minor)
    return BatchIndices(form, rows, columns, shape)


def row_lengths(kind: str, batch: int, m: int, n: int, rng: np.random.Generator) -> Array:
    """The number of elements in each row of each matrix, with equal totals; one row is empty."""
    if kind == NOTHING:
        return np.zeros((batch, m), np.int64)
    one = rng.integers(0, min(n, 6) + 1, m)
    one[-1:] = min(n, 3)
    if kind == EACH:
        return np.array([rng.permutation(one) for _ in range(batch)])
    return np.tile(one, (batch, 1))


def check(dtypes: tuple[Dtype, ...], one: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request with fresh operands, surrounded by others."""
    (dtype, result), (of, kind, trans, base, turn, library) = dtypes, one
    (m, n), (alpha, beta) = SHAPES[turn % 4], FACTORS[(turn + turn // 4) % 4]
    batch, block = (2, 3, 1)[turn % 3], (1, 1)
    if of is SparseFormat.BSR:
        block = (2, 2) if turn % 2 else (4, 4)
        m, n = (-(-extent // step) * step for extent, step in zip((m, n), block, strict=True))
    form = SparseForm(of, (m, n), base, block)
    indices = draw_batch_indices(form, kind, batch, np.int64 if turn % 5 == 2 else np.int32, rng)

    def normal(*shape: int, of: Dtype = dtype) -> Array:
        numbers = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
        return np.asarray(numbers.astype(of.numpy))

    long, short = shape_of(form, trans)

    def place_operand(array: Array, *, by_rows: bool = True) -> GuardedBuffer:
        return place(device, array, None if by_rows else (0, 2, 1), 2)

    parts = {"values": normal(*indices.shape), "rows": indices.rows, "columns": indices.columns}
    is_blocks = of is SparseFormat.BSR  # the elements of blocks are contiguous
    fields: dict[str, Any] = {
        each: device.array(part) if is_blocks and each == "values" else place_operand(part).view
        for each, part in parts.items()
    }
    fields |= {
        "b": place_operand(normal(batch, short, WIDE), by_rows=turn % 2 == 0).view,
        "alpha": alpha,
        "trans": trans,
    }
    fields |= {"library": library}
    shape, by_rows = (batch, long, WIDE), turn // 2 % 2 == 0
    written: tuple[GuardedBuffer, ...] = ()
    adds = turn % 3 != 0 and kind != NOTHING
    if adds:
        memory = place_operand(normal(*shape, of=result) if beta else poison(result, shape), by_rows=by_rows)
        fields |= {"c": memory.view, "beta": beta}
        if turn % 3 == 1:
            fields["out"], written = memory.view, (memory,)
    if "out" not in fields and (turn % 4 != 3 or (result is not dtype and not adds)):
        memory = place_operand(poison(result, shape), by_rows=by_rows)
        fields["out"], written = memory.view, (memory,)
    request = BatchedSpmmRequest(**fields, form=form)
    expected = evaluate(request, EXACT)
    sizes: dict[str, Any] = {
        each: np.abs(np.asarray(tensor)) for each, tensor, _ in request.tensors() if each in ("values", "b", "c")
    }
    factors = {each: abs(request.factor(each)) for each in ("alpha", "beta")}
    with np.errstate(all="ignore"):
        size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    bound = rounded((max(m, n) + 4) * unit * size, expected["out"], result)
    return Check(name, request, expected, {"out": np.asarray(bound)}, written)
