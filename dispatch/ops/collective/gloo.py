"""Collectives between processes of the host that were not started by mpirun: gloo moves bytes, NumPy reduces.

For a reduction the ranks exchange parts, and each rank reduces its own part of all operands in rank order; so results
are the same to the last bit on all ranks, and all dtypes of NumPy work. Small operands are sent whole, in one round.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.collective.group import is_group_open
from dispatch.ops.collective.processes import (
    MESSAGE_TAG,
    POINT_TO_POINT,
    bytes_per_rank,
    finish_with,
    operand_bytes,
    reduction_operand,
)
from dispatch.ops.collective.reference import RankInput, call_signature, reduce_inputs
from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.layout import Array
    from dispatch.libraries.gloo.communicator import GlooCommunicator

    Finish = Callable[[], Array | None]

__all__ = ["begin"]

SMALL = 1 << 15  # bytes up to which an operand is sent whole to all ranks


def begin(request: Any) -> Finish:
    """Begin a call; the returned function waits for it and returns this rank's result.

    The calls of all ranks are compared before data is sent, because gloo treats parts of a different size as a broken
    connection. In a group the comparison begins at once, and the data is sent at the group's end.
    """
    comm, start = request.ranks, BEGIN[request.op]
    if request.op in POINT_TO_POINT:
        return start(comm, request)
    compared = comm.compare(call_signature(request))
    if not is_group_open():
        compared()
        return start(comm, request)

    def both() -> Array | None:
        compared()
        return start(comm, request)()

    return both


def _rank_bytes(array: Any, counts: Sequence[int] | None, size: int) -> list[Array]:
    """The bytes of each rank's rows."""
    raw = operand_bytes(array)
    ends = np.cumsum([0, *bytes_per_rank(raw.size, counts, size)])
    return [raw[first:last] for first, last in pairwise(ends)]


# -- reductions -------------------------------------------------------------------------------------------------------
def _total(request: Any, dtype: Any, parts: Sequence[Array]) -> Array:
    how = RedOp.SUM if request.red_op is RedOp.PREMUL_SUM else request.red_op
    return reduce_inputs([RankInput(part.view(dtype)) for part in parts], how)


def _all_reduce(comm: GlooCommunicator, request: Any) -> Finish:
    operand, size = reduction_operand(request), comm.size
    raw, shape = operand.reshape(-1).view(np.uint8), request.x.shape
    if raw.size <= SMALL:
        wait = comm.exchange("all_reduce", [raw] * size, [raw.size] * size)
        return lambda: _total(request, operand.dtype, wait()).reshape(shape)
    parts = [part.view(np.uint8) for part in np.array_split(operand.reshape(-1), size)]
    part_size = parts[comm.rank].size
    first = comm.exchange("all_reduce", parts, [part_size] * size)

    def finish() -> Array:
        total = _total(request, operand.dtype, first()).view(np.uint8)
        totals = comm.exchange("all_reduce", [total] * size, [part.size for part in parts])()
        result: Array = np.concatenate(totals).view(operand.dtype).reshape(shape)
        return result

    return finish


def _reduce_to(comm: GlooCommunicator, request: Any) -> Finish:
    operand = reduction_operand(request)
    raw, is_root = operand.reshape(-1).view(np.uint8), comm.rank == request.root
    wait = _to_root(comm, "reduce_to", raw, [raw.size] * comm.size, request.root)
    return lambda: (
        _total(request, operand.dtype, parts).reshape(operand.shape) if (parts := wait()) and is_root else None
    )


def _reduce_scatter(comm: GlooCommunicator, request: Any) -> Finish:
    operand, output = reduction_operand(request), request.outputs()["out"]
    parts = _rank_bytes(operand, request.counts, comm.size)
    wait = comm.exchange("reduce_scatter", parts, [parts[comm.rank].size] * comm.size)
    return lambda: np.reshape(_total(request, operand.dtype, wait()), output.shape)


# -- moves ------------------------------------------------------------------------------------------------------------
def _to_root(
    comm: GlooCommunicator, what: str, raw: Array, sizes: Sequence[int], root: int
) -> Callable[[], list[Array]]:
    parts = [raw if rank == root else raw[:0] for rank in range(comm.size)]
    return comm.exchange(what, parts, sizes if comm.rank == root else [0] * comm.size)


def _assemble(request: Any, found: Sequence[Array]) -> Array:
    """The result, from the bytes of all ranks."""
    output = request.outputs()["out"]
    result: Array = np.concatenate(found).view(output.dtype.numpy).reshape(output.shape)
    return result


def _size(request: Any) -> int:
    output = request.outputs()["out"]
    return int(np.prod(output.shape, dtype=np.int64)) * int(output.dtype.itemsize)


def _broadcast(comm: GlooCommunicator, request: Any) -> Finish:
    raw = operand_bytes(request.x)
    result: Array = raw.view(request.x.dtype.numpy).reshape(request.x.shape)
    if not raw.size:
        return lambda: result
    wait = comm.broadcast("broadcast", raw, request.root)
    return finish_with(wait, lambda: result)


def _all_gather(comm: GlooCommunicator, request: Any) -> Finish:
    sizes = bytes_per_rank(_size(request), request.counts, comm.size)
    wait = comm.exchange("all_gather", [operand_bytes(request.x)] * comm.size, sizes)
    return lambda: _assemble(request, wait())


def _gather(comm: GlooCommunicator, request: Any) -> Finish:
    is_root = comm.rank == request.root
    sizes = bytes_per_rank(_size(request), request.counts, comm.size) if is_root else [0] * comm.size
    wait = _to_root(comm, "gather", operand_bytes(request.x), sizes, request.root)
    return lambda: _assemble(request, parts) if (parts := wait()) and is_root else None


def _scatter(comm: GlooCommunicator, request: Any) -> Finish:
    empty = np.empty(0, np.uint8)
    is_root = comm.rank == request.root
    parts = _rank_bytes(request.x, request.counts, comm.size) if is_root else [empty] * comm.size
    sizes = [_size(request) if rank == request.root else 0 for rank in range(comm.size)]
    wait = comm.exchange("scatter", parts, sizes)
    return lambda: _assemble(request, wait())


def _all_to_all(comm: GlooCommunicator, request: Any) -> Finish:
    parts = _rank_bytes(request.x, request.send_counts, comm.size)
    wait = comm.exchange("all_to_all", parts, bytes_per_rank(_size(request), request.recv_counts, comm.size))
    return lambda: _assemble(request, wait())


def _send(comm: GlooCommunicator, request: Any) -> Finish:
    return comm.send(f"send to rank {request.peer}", operand_bytes(request.x), request.peer, MESSAGE_TAG)


def _recv(comm: GlooCommunicator, request: Any) -> Finish:
    buffer = np.empty(_size(request), np.uint8)
    wait = comm.receive(f"recv from rank {request.peer}", buffer, request.peer, MESSAGE_TAG)
    return finish_with(wait, partial(_assemble, request, [buffer]))


def _sendrecv(comm: GlooCommunicator, request: Any) -> Finish:
    buffer, sent = np.empty(_size(request), np.uint8), operand_bytes(request.x)
    wait_received = comm.receive(f"sendrecv from rank {request.source}", buffer, request.source, MESSAGE_TAG)
    wait_sent = comm.send(f"sendrecv to rank {request.dest}", sent, request.dest, MESSAGE_TAG)
    return finish_with(lambda: (wait_received(), wait_sent()), partial(_assemble, request, [buffer]))


def _barrier(comm: GlooCommunicator, request: Any) -> Finish:
    del comm, request
    return lambda: None  # comparing the calls has already waited for all ranks


BEGIN: dict[str, Callable[[Any, Any], Finish]] = {
    "all_reduce": _all_reduce,
    "reduce_to": _reduce_to,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "recv": _recv,
    "sendrecv": _sendrecv,
    "barrier": _barrier,
}
