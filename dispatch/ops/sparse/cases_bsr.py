"""The cases between CSR and BSR: every pattern, several block sizes, indices of both widths and of two, both bases.

Nothing is computed, so results must be exact.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse.bsr_conversions import Bsr2csrRequest, Csr2bsrNnzRequest, Csr2bsrRequest
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, stored
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["BSR_OPS", "bsr_cases"]

BSR_OPS: dict[str, Any] = {kind.op: kind for kind in (Csr2bsrNnzRequest, Csr2bsrRequest, Bsr2csrRequest)}
BLOCKS = ((2, 2), (4, 2), (1, 3), (3, 1), (1, 1), (3, 5), (8, 8))
COARSE = ((5, 7), (9, 3), (1, 4), (6, 6), (4, 1))  # rows and columns of blocks; a matrix may be a single block
EMPTY = ((0, 4), (4, 0))
WIDTHS = ((np.int32, np.int32), (np.int64, np.int64), (np.int64, np.int32))  # of offsets, and of indices


class Form(NamedTuple):
    """A case: the pattern, extents and blocks, the base, widths of indices, and whether results are given."""

    pattern: str
    shape: tuple[int, int]
    block: tuple[int, int]
    base: int
    widths: tuple[Any, Any]
    has_out: bool


def bsr_cases(row: Row) -> list[MadeCase]:
    """Every pattern twice, all other properties in turn; then matrices without rows or columns."""
    op, dtype = row.op, row.dtypes[0]
    listed = []
    for number, pattern in enumerate((*PATTERNS, *PATTERNS, "nothing", "nothing")):
        high, wide = BLOCKS[(number + number // 7) % len(BLOCKS)]
        coarse = COARSE[(number + number // 5) % len(COARSE)] if number < 2 * len(PATTERNS) else EMPTY[number % 2]
        base = (number + number // len(PATTERNS)) % 2
        shape = (coarse[0] * high, coarse[1] * wide)
        form = Form(pattern, shape, (high, wide), base, WIDTHS[number % 3], has_out=number % 4 != 3)
        listed.append(MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)))
    return listed


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands."""
    (m, n), to_csr = form.shape, op == "bsr2csr"
    mask = PATTERNS[form.pattern](rng, (m, n))[:m, :n]
    mask = np.pad(mask, ((0, m - mask.shape[0]), (0, n - mask.shape[1])))
    if mask.size and form.pattern != "nothing":
        mask[-1, 0] = True  # ensures at least one element
    drawn = rng.standard_normal(mask.shape) + (1j * rng.standard_normal(mask.shape) if dtype.is_complex else 0)
    drawn = np.where(rng.random(mask.shape) < 0.1, 0, drawn).astype(dtype.numpy)  # a stored 0 is an element
    kind, block = (SparseFormat.BSR, form.block) if to_csr else (SparseFormat.CSR, (1, 1))
    values, rows, columns, matrix_form = stored(mask, drawn, kind, form.base, np.int64, block)
    offsets, indices = form.widths
    # Blocks are contiguous, so only whole blocks have neighbours.
    held = place(device, values.reshape(-1), None, 2).view.reshape(values.shape)
    fields: dict[str, Any] = {
        "values": held,
        "rows": place(device, rows.astype(offsets), None, 2).view,
        "columns": place(device, columns.astype(indices), None, 2).view,
        "form": matrix_form,
    }
    if not to_csr:
        fields["block"] = form.block
    if op == "csr2bsr":
        count = mask.reshape(m // form.block[0], form.block[0], n // form.block[1], form.block[1]).any(axis=(1, 3))
        fields["nnzb"] = int(count.sum())
    request = BSR_OPS[op](**fields)
    written: tuple[GuardedBuffer, ...] = ()
    if form.has_out:
        memories = {
            each: place(device, poison(out.dtype, out.shape), None, 0 if len(out.shape) > 1 else 2)
            for each, out in request.outputs().items()
        }
        request = request.replace(**{each: memory.view for each, memory in memories.items()})
        written = tuple(memories.values())
    expected = evaluate(request, EXACT)
    return Check(name, request, expected, {each: np.zeros(()) for each in expected}, written)
