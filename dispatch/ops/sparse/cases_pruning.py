"""The cases of pruning: thresholds and percentages, row-major and column-major matrices, and empty results."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT
from dispatch.ops.sparse.pruning import PruneNnzRequest, PruneToCsrRequest
from dispatch.ops.sparse.pruning_reference import kept_mask
from dispatch.ops.sparse.reference import evaluate
from dispatch.testing.check import Check, GuardedBuffer, MadeCase, place, poison

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["PRUNED", "pruning_cases"]

PRUNED: dict[str, Any] = {kind.op: kind for kind in (PruneNnzRequest, PruneToCsrRequest)}
SHAPES = ((12, 16), (20, 7), (1, 9), (30, 1), (24, 24), (0, 4), (4, 0))
CUTS: tuple[dict[str, Any], ...] = (
    {"threshold": 0.5},
    {"percentage": 50.0},
    {"threshold": 0.0},
    {"percentage": 90.0},
    {"threshold": 100.0},
    {"percentage": 0.0},
    {"percentage": 100.0},
)


def pruning_cases(row: Row) -> list[MadeCase]:
    """Each shape with several cuts, in both orders."""
    op, dtype = row.op, row.dtypes[0]
    return [MadeCase(f"{dtype}-{turn}", partial(check, op, dtype, turn)) for turn in range(3 * len(CUTS))]


def check(op: str, dtype: Dtype, turn: int, name: str, device: Device, rng: np.random.Generator) -> Check:
    """A request with fresh operands; no two magnitudes are equal, and some elements are 0."""
    shape, cut = SHAPES[(turn + turn // 7) % len(SHAPES)], CUTS[turn % len(CUTS)]
    a = rng.standard_normal(shape) * (rng.random(shape) < 0.8)
    fields: dict[str, Any] = {"a": place(device, a.astype(dtype.numpy), (1, 0) if turn % 2 else None, 2).view, **cut}
    kind = PRUNED[op]
    if op == "prune_to_csr":
        fields["nnz"] = int(np.count_nonzero(kept_mask(PruneNnzRequest(fields["a"], **cut))))
    request = kind(**fields)
    written: tuple[GuardedBuffer, ...] = ()
    if turn % 3:
        outputs = request.outputs().items()
        memories = {each: place(device, poison(output.dtype, output.shape), None, 2) for each, output in outputs}
        request = request.replace(**{each: memory.view for each, memory in memories.items()})
        written = tuple(memories.values())
    expected = evaluate(request, EXACT)
    return Check(name, request, expected, {each: np.zeros(()) for each in expected}, written)
