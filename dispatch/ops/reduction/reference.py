"""What a ReduceRequest means, in NumPy: for the host rows in their own precision, in f64 as the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import EXACT, Results, largest, values
from dispatch.keys import F32, F64
from dispatch.ops.reduction.request import ReduceOp

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.ops.reduction.request import ReduceRequest

__all__ = ["evaluate", "reference", "rows_of"]


def rows_of(request: ReduceRequest, work: np.dtype[Any]) -> Array:
    """x with the reduced axes as one, the last, in row-major order."""
    x, reduced = values(request.x, work), request.reduced
    kept = [axis for axis in range(x.ndim) if axis not in reduced]
    count = int(np.prod([x.shape[axis] for axis in reduced], dtype=np.int64))
    return np.asarray(x.transpose([*kept, *reduced]).reshape(*(x.shape[axis] for axis in kept), count))


def evaluate(request: ReduceRequest, work: np.dtype[Any]) -> Results:
    """The outputs of a request by name, computed in a working dtype."""
    rows = rows_of(request, work)
    shape = request.made()["out"].shape
    reduced = _reduce(request.reduce, rows)
    if request.reduce in (ReduceOp.MIN, ReduceOp.MAX) and rows.dtype.kind == "f":
        # cuDNN starts from the largest finite number of what it computes in, or the lowest: infinity is none of these.
        top = rows.dtype.type(largest(F64 if request.x.dtype is F64 else F32))
        reduced = np.minimum(reduced, top) if request.reduce is ReduceOp.MIN else np.maximum(reduced, -top)
    results = {"out": reduced.reshape(shape)}
    if request.indices:
        order = np.abs(rows) if request.reduce is ReduceOp.AMAX else rows
        found = order.argmin(axis=-1) if request.reduce is ReduceOp.MIN else order.argmax(axis=-1)
        results["index"] = np.asarray(found).astype(np.uint32).reshape(shape)
    return results


def _reduce(op: ReduceOp, rows: Array) -> Array:
    if op is ReduceOp.ADD:
        reduced = rows.sum(axis=-1)
    elif op is ReduceOp.MUL:
        reduced = rows.prod(axis=-1)
    elif op is ReduceOp.MIN:
        reduced = rows.min(axis=-1)
    elif op is ReduceOp.MAX:
        reduced = rows.max(axis=-1)
    elif op is ReduceOp.AMAX:
        reduced = np.abs(rows).max(axis=-1)
    elif op is ReduceOp.AVG:
        reduced = rows.mean(axis=-1)
    elif op is ReduceOp.NORM1:
        reduced = np.abs(rows).sum(axis=-1)
    elif op is ReduceOp.NORM2:
        reduced = np.sqrt((rows * rows).sum(axis=-1))
    else:
        reduced = np.where(rows == 0, rows.dtype.type(1), rows).prod(axis=-1)
    return np.asarray(reduced)


def reference(request: ReduceRequest) -> Results:
    """The outputs of a request in float64, by name."""
    return evaluate(request, EXACT)
