"""Collectives between processes on the host, by MPI's nonblocking calls.

MPI has no floating-point types of 8 and 16 bits: such operands are reduced in f32 and rounded once. Data that is only
moved is sent as bytes. A mean is a sum, divided afterwards. Follows MPI 4.1, chapters 3 and 6, through mpi4py's calls
with capital letters.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.mpi.communicator import mpi
from dispatch.ops.collective.group import is_group_open
from dispatch.ops.collective.processes import (
    MESSAGE_TAG,
    POINT_TO_POINT,
    bytes_per_rank,
    finish_with,
    operand_bytes,
    reduction_operand,
    rows_per_rank,
)
from dispatch.ops.collective.reference import call_signature, mean, work_dtype
from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.layout import Array
    from dispatch.libraries.mpi.communicator import MpiCommunicator

    Finish = Callable[[], Array | None]

__all__ = ["begin"]

WIDER = {np.dtype(np.int8): np.dtype(np.int32), np.dtype(np.uint8): np.dtype(np.uint32)}
OPS = {RedOp.PROD: "PROD", RedOp.MAX: "MAX", RedOp.MIN: "MIN"}  # the others are sums


def begin(request: Any) -> Finish:
    """Begin MPI's call; the returned function waits for it and returns this rank's result.

    MPI silently computes wrong numbers if the calls of the ranks differ. So the ranks compare their calls first. In a
    group, which must not wait, the comparison ends before the result is returned.
    """
    comm, start = request.ranks, BEGIN[request.op]
    if request.op in POINT_TO_POINT or comm.size == 1:
        return start(comm, request)
    compared = comm.compare(call_signature(request))
    if not is_group_open():
        compared()
        return start(comm, request)
    finish = start(comm, request)

    def both() -> Array | None:
        try:
            compared()
        except BaseException:
            comm.abandon(finish)
            raise
        return finish()

    return both


# -- reductions -------------------------------------------------------------------------------------------------------
def _reduction_operand(request: Any) -> Array:
    """This rank's operand of the reduction: in the working dtype, times its factor.

    Integers of 8 bits are sent as wider ones, because some of Open MPI's kernels saturate their sums.
    """
    operand = reduction_operand(request)
    return operand.astype(WIDER.get(operand.dtype, operand.dtype), copy=False)


def _op(request: Any) -> Any:
    return getattr(mpi(), OPS.get(request.red_op, "SUM"))


def _finish_total(request: Any, total: Array, size: int) -> Array:
    """The result of the reduction, from MPI's total."""
    result = total.astype(work_dtype(request.x.dtype), copy=False)  # integers wrap around
    return mean(result, size) if request.red_op is RedOp.AVG else result


def _all_reduce(comm: MpiCommunicator, request: Any) -> Finish:
    operand = _reduction_operand(request)
    total = np.empty_like(operand)
    wait = comm.begin("all_reduce", lambda: comm.comm.Iallreduce(operand, total, _op(request)), operand, total)
    return finish_with(wait, lambda: _finish_total(request, total, comm.size))


def _reduce_to(comm: MpiCommunicator, request: Any) -> Finish:
    operand, is_root = _reduction_operand(request), comm.rank == request.root
    total = np.empty_like(operand) if is_root else None
    start = partial(comm.comm.Ireduce, operand, total, _op(request), request.root)
    wait = comm.begin("reduce_to", start, operand, total)
    return finish_with(wait, lambda: None if total is None else _finish_total(request, total, comm.size))


def _reduce_scatter(comm: MpiCommunicator, request: Any) -> Finish:
    operand = _reduction_operand(request)
    counts = rows_per_rank(request.counts, comm.size)
    width = operand.size // max(sum(counts), 1)  # elements in a row
    output = request.outputs()["out"]
    total = np.empty(output.shape, operand.dtype)
    start = partial(comm.comm.Ireduce_scatter, operand, total, [count * width for count in counts], _op(request))
    wait = comm.begin("reduce_scatter", start, operand, total)
    return finish_with(wait, lambda: _finish_total(request, total, comm.size))


# -- moves ------------------------------------------------------------------------------------------------------------
def _result_buffer(request: Any) -> tuple[Array, Callable[[], Array]]:
    """Memory for the received data, as bytes, and a function that returns it as the result."""
    output = request.outputs()["out"]
    result = np.empty(output.shape, output.dtype.numpy)
    return result.reshape(-1).view(np.uint8), lambda: result


def _counts_and_offsets(counts: Sequence[int] | None, nbytes: int, size: int) -> tuple[list[int], list[int]]:
    """The number of bytes for each rank, and their offsets."""
    sizes = bytes_per_rank(nbytes, counts, size)
    return sizes, [sum(sizes[:rank]) for rank in range(size)]


def _broadcast(comm: MpiCommunicator, request: Any) -> Finish:
    raw = operand_bytes(request.x)
    wait = comm.begin("broadcast", lambda: comm.comm.Ibcast([raw, mpi().BYTE], request.root), raw)
    result = raw.view(request.x.dtype.numpy).reshape(request.x.shape)
    return finish_with(wait, lambda: result)


def _all_gather(comm: MpiCommunicator, request: Any) -> Finish:
    sent, (buffer, get_result) = operand_bytes(request.x), _result_buffer(request)
    into = [buffer, *_counts_and_offsets(request.counts, buffer.size, comm.size), mpi().BYTE]
    wait = comm.begin("all_gather", lambda: comm.comm.Iallgatherv([sent, mpi().BYTE], into), sent, buffer)
    return finish_with(wait, get_result)


def _gather(comm: MpiCommunicator, request: Any) -> Finish:
    sent = operand_bytes(request.x)
    buffer: Array | None = None
    get_result: Callable[[], Array | None] = lambda: None  # noqa: E731  # for a rank that gets nothing
    into: list[Any] | None = None
    if comm.rank == request.root:
        buffer, get_result = _result_buffer(request)
        into = [buffer, *_counts_and_offsets(request.counts, buffer.size, comm.size), mpi().BYTE]
    wait = comm.begin("gather", lambda: comm.comm.Igatherv([sent, mpi().BYTE], into, request.root), sent, buffer)
    return finish_with(wait, get_result)


def _scatter(comm: MpiCommunicator, request: Any) -> Finish:
    buffer, get_result = _result_buffer(request)
    sent = None if request.x is None else operand_bytes(request.x)
    out_of = None if sent is None else [sent, *_counts_and_offsets(request.counts, sent.size, comm.size), mpi().BYTE]
    start = partial(comm.comm.Iscatterv, out_of, [buffer, mpi().BYTE], request.root)
    return finish_with(comm.begin("scatter", start, sent, buffer), get_result)


def _all_to_all(comm: MpiCommunicator, request: Any) -> Finish:
    sent, (buffer, get_result) = operand_bytes(request.x), _result_buffer(request)
    out_of = [sent, *_counts_and_offsets(request.send_counts, sent.size, comm.size), mpi().BYTE]
    into = [buffer, *_counts_and_offsets(request.recv_counts, buffer.size, comm.size), mpi().BYTE]
    wait = comm.begin("all_to_all", lambda: comm.comm.Ialltoallv(out_of, into), sent, buffer)
    return finish_with(wait, get_result)


def _send(comm: MpiCommunicator, request: Any) -> Finish:
    sent = operand_bytes(request.x)
    start = partial(comm.comm.Isend, [sent, mpi().BYTE], request.peer, MESSAGE_TAG)
    return finish_with(comm.begin(f"send to rank {request.peer}", start, sent), lambda: None)


def _recv(comm: MpiCommunicator, request: Any) -> Finish:
    buffer, get_result = _result_buffer(request)
    start = partial(comm.comm.Irecv, [buffer, mpi().BYTE], request.peer, MESSAGE_TAG)
    return finish_with(comm.begin(f"recv from rank {request.peer}", start, buffer), get_result)


def _sendrecv(comm: MpiCommunicator, request: Any) -> Finish:
    sent, (buffer, get_result) = operand_bytes(request.x), _result_buffer(request)
    into = partial(comm.comm.Irecv, [buffer, mpi().BYTE], request.source, MESSAGE_TAG)
    wait_received = comm.begin(f"sendrecv from rank {request.source}", into, buffer)
    out_of = partial(comm.comm.Isend, [sent, mpi().BYTE], request.dest, MESSAGE_TAG)
    wait_sent = comm.begin(f"sendrecv to rank {request.dest}", out_of, sent)
    return finish_with(lambda: (wait_received(), wait_sent())[0], get_result)


def _barrier(comm: MpiCommunicator, request: Any) -> Finish:
    del request
    return finish_with(comm.begin("barrier", comm.comm.Ibarrier), lambda: None)


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
