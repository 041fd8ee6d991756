"""The cases of dense products at the places of a batch of sparse matrices: shared or separate patterns, every format.

The added operand may be shared or separate, and so may a or b; terms are contiguous or not.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.keys import F32, HALF
from dispatch.ops.sparse.batched import BatchedSddmmRequest
from dispatch.ops.sparse.cases_batched import FACTORS, KINDS, NOTHING, SHAPES, draw_batch_indices
from dispatch.ops.sparse.form import SparseForm, SparseFormat
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded
from dispatch.testing.mutations import altered

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["sampled_batch_cases"]

FORMATS = (SparseFormat.CSR, SparseFormat.CSC, SparseFormat.COO)
TERMS = (8, 5, 1, 33)
EACH, A_FOR_ALL, B_FOR_ALL = range(3)
ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0))  # of axes in memory; the last two have an inner batch axis


def sampled_batch_cases(row: Row) -> list[MadeCase]:
    """Each kind of batch in each format, with both bases; then matrices without elements, and sums without terms."""
    dtype = row.dtypes[0]
    turns = enumerate(product(KINDS, FORMATS, (0, 1)))
    listed = [MadeCase(f"{dtype}-{turn}", partial(check, dtype, *one, TERMS[turn % 4], turn)) for turn, one in turns]
    listed += [
        MadeCase(f"{dtype}-nothing-{turn}", partial(check, dtype, NOTHING, kind, 0, 3, turn))
        for turn, kind in enumerate(FORMATS)
    ]
    return [*listed, MadeCase(f"{dtype}-no-terms", partial(check, dtype, KINDS[-1], SparseFormat.CSR, 1, 0, 1))]


def check(
    dtype: Dtype,
    of: str,
    kind: SparseFormat,
    base: int,
    terms: int,
    turn: int,
    name: str,
    device: Device,
    rng: np.random.Generator,
) -> Check:
    """A request with fresh operands, surrounded by others."""
    (m, n), (alpha, beta) = SHAPES[(turn + turn // 4) % 4], FACTORS[(turn + turn // 5) % 4]
    batch, dense = (3, 2, 1)[turn // 2 % 3], (EACH, A_FOR_ALL, EACH, B_FOR_ALL)[(turn + turn // 4) % 4]
    form = SparseForm(kind, (m, n), base)
    indices = draw_batch_indices(form, of, batch, np.int64 if turn % 5 == 2 else np.int32, rng)

    def normal(*shape: int) -> Array:
        numbers = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.is_complex else 0)
        return np.asarray(numbers.astype(dtype.numpy))

    def place_operand(array: Array, order: tuple[int, ...] | None = None) -> GuardedBuffer:
        return place(device, array, order, 2)

    def matrices(shape: tuple[int, int], for_all: bool, order: tuple[int, ...]) -> GuardedBuffer:
        if for_all:
            return place_operand(normal(*shape), (1, 0) if order[1] > order[2] else None)
        return place_operand(normal(batch, *shape), order)

    fields: dict[str, Any] = {
        "rows": place_operand(indices.rows).view,
        "columns": place_operand(indices.columns).view,
        "alpha": alpha,
    }
    fields["a"] = matrices((m, terms), dense == A_FOR_ALL, ORDERS[turn % 4]).view
    fields["b"] = matrices((terms, n), dense == B_FOR_ALL, ORDERS[(turn + turn // 4) % 4]).view
    if beta or turn % 3:
        fields["beta"] = beta
    shape = (batch, indices.shape[-1])
    held = shape if turn % 5 == 3 else indices.shape  # a shared pattern may have separate elements
    memory = place_operand(normal(*held) if beta else poison(dtype, held))
    fields["values"] = memory.view
    written: tuple[GuardedBuffer, ...] = ()
    if turn % 3 == 1 and held == shape:
        fields["out"], written = memory.view, (memory,)
    elif turn % 4 != 3:
        memory = place_operand(poison(dtype, shape))
        fields["out"], written = memory.view, (memory,)
    request = BatchedSddmmRequest(**fields, form=form)
    expected = evaluate(request, EXACT)
    sizes: dict[str, Any] = {
        each: np.abs(np.asarray(tensor)) for each, tensor, _ in request.tensors() if each in ("values", "a", "b")
    }
    factors = {each: abs(request.factor(each)) for each in request.numbers}
    with np.errstate(all="ignore"):
        size = np.abs(altered(evaluate, request, **sizes, **factors)["out"])
    unit = ROUNDOFF[F32 if dtype in HALF else dtype][0] * (4 if dtype.is_complex else 1)
    bound = rounded((terms + 4) * unit * size, expected["out"], dtype)
    return Check(name, request, expected, {"out": np.asarray(bound)}, written)
