"""The cases of sorting: every pattern in COO and in CSR, with unsorted, unique elements."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.ops.sparse.reference import evaluate
from dispatch.ops.sparse.sorting import SparseSortRequest
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["sorting_cases"]

SHAPES = ((12, 16), (36, 12), (1, 8), (24, 24), (8, 1), (48, 36))


def sorting_cases(row: Row) -> list[MadeCase]:
    """Each pattern in each format, including those without elements."""
    dtype = row.dtypes[0]
    pairs = list(product(PATTERNS, (SparseFormat.COO, SparseFormat.CSR)))
    return [MadeCase(f"{dtype}-{turn}", partial(check, dtype, *pair, turn)) for turn, pair in enumerate(pairs)]


def check(
    dtype: Dtype, pattern: str, kind: SparseFormat, turn: int, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A request with fresh operands, surrounded by others."""
    shape, base = SHAPES[turn // 2 % 6], turn // 3 % 2
    mask = PATTERNS[pattern](rng, shape)
    drawn = rng.standard_normal(mask.shape)
    drawn = (drawn + 1j * rng.standard_normal(mask.shape) if dtype.is_complex else drawn).astype(dtype.numpy)
    values, rows, columns, form = stored(mask, drawn, kind, base, np.int32)
    order = rng.permutation(len(values))
    if kind is SparseFormat.CSR:  # within each row
        lines = np.repeat(np.arange(len(rows) - 1), np.diff(rows))
        order = order[np.argsort(lines[order], kind="stable")]
    else:
        rows = rows[order]
    parts: dict[str, Any] = {"values": values[order], "rows": rows, "columns": columns[order]}
    fields: dict[str, Any] = {each: place(device, part, None, 2).view for each, part in parts.items()}
    request = SparseSortRequest(**fields, form=form)
    written: tuple[GuardedBuffer, ...] = ()
    if turn % 3:
        outputs = request.outputs().items()
        memories = {each: place(device, poison(output.dtype, output.shape), None, 2) for each, output in outputs}
        request = request.replace(**{each: memory.view for each, memory in memories.items()})
        written = tuple(memories.values())
    expected = evaluate(request, EXACT)
    return Check(name, request, expected, {each: np.zeros(()) for each in expected}, written)
