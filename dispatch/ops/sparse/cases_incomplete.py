"""The cases of incomplete factorizations: every pattern with its diagonal, zero pivots, and missing places."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.incomplete import Ic0Request, Ilu0Request
from dispatch.ops.sparse.incomplete_reference import evaluate
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.testing.check import ROUNDOFF, Check, GuardedBuffer, MadeCase, place, poison, rounded

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.keys import Dtype

__all__ = ["INCOMPLETE_OPS", "incomplete_cases"]

KINDS: dict[str, Any] = {"ilu0": Ilu0Request, "ic0": Ic0Request}
INCOMPLETE_OPS = tuple(KINDS)
SIZES = (24, 36, 1, 8, 48)
ALL_PIVOTS, ZERO_PIVOT, MISSING_PIVOT = range(3)  # pivots: all are stored, one is 0, one is not stored


def incomplete_cases(row: Row) -> list[MadeCase]:
    """Each pattern with pivots and without."""
    op, dtype = row.op, row.dtypes[0]
    turns = [*product(PATTERNS, (ALL_PIVOTS,)), *product(("random", "banded"), (ZERO_PIVOT, MISSING_PIVOT))]
    return [MadeCase(f"{dtype}-{turn}", partial(check, op, dtype, *one, turn)) for turn, one in enumerate(turns)]


def matrix(op: str, dtype: Dtype, pattern: str, pivots: int, n: int, rng: np.random.Generator) -> tuple[Any, Array]:
    """The places and values of elements: the diagonal outweighs the rest of each row and column."""
    mask = PATTERNS[pattern](rng, (n, n))
    n = len(mask)
    mask = mask | np.eye(n, dtype=bool)
    drawn = rng.standard_normal((n, n)) + (1j * rng.standard_normal((n, n)) if dtype.is_complex else 0)
    if op == "ic0":
        mask = mask | mask.T
        drawn = np.tril(drawn, -1) + np.tril(drawn, -1).conj().T
    sizes = np.abs(np.where(mask, drawn, 0))
    drawn[np.diag_indices(n)] = 1 + sizes.sum(axis=0) + sizes.sum(axis=1)
    if op == "ic0":
        drawn[np.triu_indices(n, 1)] = np.nan  # must not be read
    if pivots == ZERO_PIVOT:
        drawn[0, 0] = 0
    elif pivots == MISSING_PIVOT:
        mask[n // 2, n // 2] = False
    return mask, drawn.astype(dtype.numpy)


def check(
    op: str, dtype: Dtype, pattern: str, pivots: int, turn: int, name: str, device: Device, rng: np.random.Generator
) -> Check:
    """A request with fresh operands, surrounded by others."""
    mask, drawn = matrix(op, dtype, pattern, pivots, SIZES[turn % 5], rng)
    values, rows, columns, form = stored(mask, drawn, SparseFormat.CSR, turn // 2 % 2, np.int32)
    if turn % 3 == 1:
        form = form._replace(pattern=int(rng.integers(1 << 40)))
    parts = {"values": values, "rows": rows, "columns": columns}
    gaps = {each: place(device, part, None, 2) for each, part in parts.items()}
    request = KINDS[op](**{each: memory.view for each, memory in gaps.items()}, form=form)
    written: tuple[GuardedBuffer, ...] = ()
    if turn % 4 == 1:
        request, written = request.replace(out=gaps["values"].view), (gaps["values"],)
    elif turn % 4 > 1:
        memory = place(device, poison(dtype, values.shape), None, 2)
        request, written = request.replace(out=memory.view), (memory,)
    expected = evaluate(request, EXACT)
    out, n = expected["out"], len(mask)
    largest = np.nanmax(np.abs(np.where(mask, drawn, 0))) if n else 0
    unit = ROUNDOFF[dtype][0] * (4 if dtype.is_complex else 1)
    bound = rounded(np.full(out.shape, 8 * (n + 4) * unit * largest), out, dtype)
    row, column = np.nonzero(mask)
    if op == "ic0" or expected["info"]:  # above the diagonal any value is valid; elsewhere NaN must match
        bound = np.where((column > row) | bool(expected["info"]), np.inf, bound)
    return Check(name, request, expected, {"out": bound, "info": np.zeros(())}, written)
