"""The cases of dense matrices converted to sparse, and of rows as offsets or indices: all patterns and formats."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse import compression
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.patterns import PATTERNS, offsets, places_of
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["COMPRESSION", "compression_cases"]

COMPRESSION: dict[str, Any] = {
    kind.op: kind
    for kind in (
        compression.DenseNnzRequest,
        compression.DenseToSparseRequest,
        compression.Coo2csrRequest,
        compression.Csr2cooRequest,
    )
}
FORMATS = (SparseFormat.CSR, SparseFormat.CSC, SparseFormat.COO)
SHAPES = ((20, 28), (36, 12), (1, 8), (24, 24), (8, 1), (48, 36))
INDICES = ("i32", "i64")


class Form(NamedTuple):
    """A case: pattern and shape, the format, the base, and the memory layouts."""

    pattern: str
    shape: tuple[int, int]
    kind: SparseFormat
    base: int
    by_rows: bool
    has_out: bool


def compression_cases(row: Row) -> list[MadeCase]:
    """Each pattern in each format; then matrices without rows or columns."""
    op, dtype = row.op, row.dtypes[0]
    shapes = [(pattern, kind, SHAPES[n % 6]) for n, (pattern, kind) in enumerate(product(PATTERNS, FORMATS))]
    shapes += [("nothing", kind, shape) for kind, shape in product(FORMATS, ((0, 4), (4, 0)))]
    listed = [
        Form(pattern, shape, kind, number // 2 % 2, by_rows=number % 2 == 0, has_out=number % 5 != 3)
        for number, (pattern, kind, shape) in enumerate(shapes)
    ]
    return [MadeCase(f"{dtype}-{number}", partial(check, op, dtype, form)) for number, form in enumerate(listed)]


def check(op: str, dtype: Dtype, form: Form, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request of a form with fresh operands; nothing is computed, so results must be exact."""
    mask = PATTERNS[form.pattern](rng, form.shape)
    if mask.size and form.pattern != "nothing":
        mask[-1, 0] = True  # ensures at least one element
        mask.reshape(-1)[mask.size // 3] = True  # and the one that tests change to NaN
    row, _ = places_of(mask)
    fields: dict[str, Any] = {}
    if op in ("dense_nnz", "dense_to_sparse"):
        drawn = rng.standard_normal(mask.shape) + (1j * rng.standard_normal(mask.shape) if dtype.is_complex else 0)
        values = np.where(mask, drawn + 4, 0).astype(dtype.numpy)
        fields["a"] = place(device, values, None if form.by_rows else (1, 0), 2).view
        if op == "dense_to_sparse":
            fields |= {"nnz": len(row), "format": form.kind, "index_dtype": INDICES[form.base]}
    else:
        count, base = len(row), form.base
        lines = row if op == "coo2csr" else offsets(row, len(mask))
        fields["rows"] = place(device, (lines + base).astype(np.int32), None, 2).view
        fields |= {"base": base, **({"m": len(mask)} if op == "coo2csr" else {"nnz": count})}
    request = COMPRESSION[op](**fields)
    written: tuple[GuardedBuffer, ...] = ()
    if form.has_out:
        memories = {
            each: place(device, poison(out.dtype, out.shape), None, 2) for each, out in request.outputs().items()
        }
        request = request.replace(**{each: memory.view for each, memory in memories.items()})
        written = tuple(memories.values())
    expected = evaluate(request, EXACT)
    return Check(name, request, expected, {each: np.zeros(()) for each in expected}, written)
