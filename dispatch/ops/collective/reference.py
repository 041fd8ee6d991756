"""Collectives in NumPy, from the operands of all ranks: used between threads on the host, and as the tests' reference.

Sums, products and means of 8-bit and 16-bit floats are computed in f32 and rounded once; those of integers wrap around,
and their means are truncated towards 0. As in NCCL's kernels, minima and maxima ignore NaN if another rank has a
number.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dispatch.core.host_plan import work_of
from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.host_plan import Results
    from dispatch.device.layout import Array

__all__ = [
    "RankInput",
    "call_signature",
    "evaluate",
    "mean",
    "rank_input",
    "rank_result",
    "reduce_inputs",
    "work_dtype",
]


class RankInput(NamedTuple):
    """One rank's input: its operand or None, its factor, and the number of rows for each rank."""

    x: Array | None
    factor: Any = 1
    counts: tuple[int, ...] | None = None


def call_signature(request: Any) -> str:
    """A description of the fields that must be the same on all ranks of a call."""
    words = [request.op]
    for name in ("reduce", "root", "counts"):
        value = getattr(request, name, None)
        if value is not None:
            words.append(f"{name}={getattr(value, 'name', value)}")
    operand = getattr(request, "x", None)
    if operand is not None:
        words.append(str(operand.dtype))
        if request.op in ("all_reduce", "reduce_to", "reduce_scatter", "broadcast"):
            words.append(str(list(operand.shape)))
        elif request.op in ("all_gather", "gather", "all_to_all"):
            uneven = getattr(request, "send_counts", getattr(request, "counts", None)) is not None
            words.append(f"rows of {list(operand.shape[1:])}" if uneven else str(list(operand.shape)))
    elif request.op == "scatter":
        words.append(str(request.out.dtype))
    return " ".join(words)


def work_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype in which the host reduces: integers and f64 in their own dtype, others in f32."""
    dtype_of_operand: np.dtype[Any] = dtype.numpy
    return dtype_of_operand if dtype_of_operand.kind in "iu" else work_of(dtype)


def rank_input(request: Any, work: np.dtype[Any] | None = None) -> RankInput:
    """This rank's input of a request, copied, and converted to a working dtype if one is given."""
    x = getattr(request, "x", None)
    values = None if x is None else np.array(x if work is None else np.asarray(x).astype(work))
    device_factor = getattr(request, "device_factor", None)
    factor = getattr(request, "factor", 1) if device_factor is None else np.asarray(device_factor).reshape(())
    if values is not None and getattr(request, "reduce", None) is RedOp.PREMUL_SUM:
        factor = np.asarray(factor).astype(np.asarray(x).dtype).astype(values.dtype)  # NCCL rounds it to x's dtype
    return RankInput(values, factor, getattr(request, "send_counts", getattr(request, "counts", None)))


def reduce_inputs(parts: Sequence[RankInput], how: RedOp) -> Array:
    """Reduce the operands of all ranks element by element."""
    arrays: list[Any] = [part.x for part in parts]
    kind = arrays[0].dtype.type
    with np.errstate(all="ignore"):
        if how is RedOp.PREMUL_SUM:
            arrays = [array * kind(part.factor) for array, part in zip(arrays, parts, strict=True)]
        total = functools.reduce(FUNCTIONS[how], arrays)
        if how is RedOp.AVG:
            total = mean(total, len(parts))
    return np.asarray(total, kind)


def mean(total: Array, count: int) -> Array:
    """A sum divided by the number of its terms, in its dtype; for integers truncated towards 0."""
    if total.dtype.kind not in "iu":
        return np.asarray(total / total.dtype.type(count))
    size = (
        np.abs(total.astype(object)) // count if total.dtype.itemsize == 8 else np.abs(total.astype(np.int64)) // count
    )
    return np.asarray(np.where(total < 0, -size, size).astype(total.dtype))


FUNCTIONS: dict[RedOp, Callable[[Any, Any], Any]] = {
    RedOp.SUM: np.add,
    RedOp.PROD: np.multiply,
    RedOp.MAX: np.fmax,
    RedOp.MIN: np.fmin,
    RedOp.AVG: np.add,
    RedOp.PREMUL_SUM: np.add,
}


def rank_rows(array: Any, counts: Sequence[int] | None, rank: int) -> Array:
    """A rank's part of an array that has a part for each rank."""
    if counts is None:
        return np.asarray(array[rank])
    first = sum(counts[:rank])
    return np.asarray(array[first : first + counts[rank]])


def _join(arrays: Sequence[Any], counts: Sequence[int] | None) -> Array:
    return np.stack(arrays) if counts is None else np.concatenate(arrays)


def rank_result(request: Any, rank: int, parts: Sequence[RankInput]) -> Array | None:
    """A rank's result, from the inputs of all ranks; None if it gets no result."""
    op: str = request.op
    arrays: list[Array | None] = [part.x for part in parts]
    is_root = rank == getattr(request, "root", rank)
    if op in ("all_reduce", "reduce_to"):
        return reduce_inputs(parts, request.red_op) if is_root else None
    if op == "reduce_scatter":
        return rank_rows(reduce_inputs(parts, request.red_op), request.counts, rank)
    if op == "broadcast":
        return parts[int(request.root)].x
    if op in ("all_gather", "gather"):
        return _join(arrays, request.counts) if is_root else None
    if op == "scatter":
        return rank_rows(arrays[request.root], request.counts, rank)
    if op == "all_to_all":
        return _join([rank_rows(part.x, part.counts, rank) for part in parts], parts[0].counts)
    if op == "sendrecv":
        return parts[int(request.source)].x
    return None  # a barrier


def evaluate(request: Any, work: np.dtype[Any]) -> Results:
    """The outputs, by name, of a request whose communicator has one rank; integers are computed as integers."""
    dtype = request.dtypes[0]
    result = rank_result(request, 0, [rank_input(request, dtype.numpy if dtype.numpy.kind in "iu" else work)])
    return {} if result is None else {"out": result}
