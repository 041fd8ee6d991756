"""Collectives of NCCL as groups of sends and receives, and the context of all calls of NCCL.

NCCL begins the calls of a group together, so that ranks which send to one another do not wait. Follows
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/p2p.html.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cudabind.sys import nccl
from dispatch.keys import BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, I64, U8, U32, U64, Dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Argument
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.nccl.communicator import NcclCommunicator

    Call = Callable[[tuple[Argument, ...], int | None], int]  # takes a plan's arguments and the handle of a stream

__all__ = ["DTYPES", "IN_PROGRESS", "MAKERS", "CallContext", "row_elements", "row_offsets", "run_in_group"]

# fmt: off
DTYPES: dict[Dtype, int] = {  # values of ncclDataType_t
    I8: 0, U8: 1, I32: 2, U32: 3, I64: 4, U64: 5, F16: 6, F32: 7, F64: 8, BF16: 9, F8E4M3: 10, F8E5M2: 11,
}
# fmt: on
IN_PROGRESS = 7  # ncclInProgress


class CallContext(NamedTuple):
    """The data with which the calls of a plan are made, which return NCCL's status."""

    request: Any
    comm: NcclCommunicator
    executor: CudaExecutor
    function: str  # the function that the row names

    @property
    def handle(self) -> Any:
        """The communicator's handle."""
        return self.comm.c_handle

    def position(self, name: str) -> int:
        """The position of an operand's address in the plan's arguments."""
        index: int = self.request.place_of(name)
        return index

    @property
    def dtype(self) -> int:
        """NCCL's number of the operands' dtype."""
        return DTYPES[self.request.dtypes[0]]


def row_elements(request: Any) -> int:
    """The number of elements in a row, also if this rank has no rows."""
    return int(np.prod(request.x.shape[1:], dtype=np.int64))


class Message(NamedTuple):
    """A send or receive of a plan: the operand, the byte offset in it, the number of elements, and the other rank."""

    function: Any
    operand: int
    offset: int
    elements: int
    peer: int


def _messages(ctx: CallContext, messages: Sequence[Message]) -> Call:
    dtype, handle = ctx.dtype, ctx.handle

    def run(given: tuple[Argument, ...], stream: int | None) -> int:
        def one(number: int) -> int:
            m = messages[number]
            address = int(given[m.operand].real) + m.offset
            return int(m.function(address, m.elements, dtype, m.peer, handle, stream))

        return one(0) if len(messages) == 1 else run_in_group([(one, number) for number in range(len(messages))])

    return run


def run_in_group(calls: Sequence[tuple[Callable[[int], int], int]]) -> int:
    """Make calls as a group of NCCL; returns the first status that is an error, or else that of ncclGroupEnd."""
    if not calls:
        return 0
    failed = int(nccl.ncclGroupStart.unchecked())
    for call, number in calls:
        status = call(number)
        failed = failed or (status if status != IN_PROGRESS else 0)
    ended = int(nccl.ncclGroupEnd.unchecked())
    return failed or ended


def row_offsets(counts: Sequence[int] | None, row: int, size: int = 0) -> list[tuple[int, int]]:
    """The byte offset of each rank's rows, and their number."""
    offsets, first = [], 0
    for count in [1] * size if counts is None else counts:
        offsets.append((first * row, count))
        first += count
    return offsets


def _receive_from_all(ctx: CallContext, counts: Sequence[int] | None, row: int) -> list[Message]:
    size, dtype = ctx.comm.size, ctx.request.dtypes[0]
    parts = row_offsets(counts, row * dtype.itemsize, size)
    receive = nccl.ncclRecv.unchecked
    return [Message(receive, ctx.position("out"), at, n * row, rank) for rank, (at, n) in enumerate(parts) if n * row]


def _send_to_all(ctx: CallContext, counts: Sequence[int] | None, row: int) -> list[Message]:
    size, dtype = ctx.comm.size, ctx.request.dtypes[0]
    parts = row_offsets(counts, row * dtype.itemsize, size)
    send = nccl.ncclSend.unchecked
    return [Message(send, ctx.position("x"), at, n * row, rank) for rank, (at, n) in enumerate(parts) if n * row]


def _gather(ctx: CallContext) -> Call:
    request = ctx.request
    row = request.x.size if request.counts is None else row_elements(request)
    sent = (
        [Message(nccl.ncclSend.unchecked, ctx.position("x"), 0, request.x.size, request.root)] if request.x.size else []
    )
    received = _receive_from_all(ctx, request.counts, row) if ctx.comm.rank == request.root else []
    return _messages(ctx, [*sent, *received])


def _scatter(ctx: CallContext) -> Call:
    request, out = ctx.request, ctx.request.outputs()["out"]
    count = int(np.prod(out.shape, dtype=np.int64))
    sent: list[Message] = []
    if request.x is not None:
        rows = request.x.shape[0]
        row = count if request.counts is None else request.x.size // max(rows, 1)
        sent = _send_to_all(ctx, request.counts, row)
    received = [Message(nccl.ncclRecv.unchecked, ctx.position("out"), 0, count, request.root)] if count else []
    return _messages(ctx, [*sent, *received])


def _all_to_all(ctx: CallContext) -> Call:
    request = ctx.request
    row = request.x.size // ctx.comm.size if request.send_counts is None else row_elements(request)
    return _messages(
        ctx,
        [*_send_to_all(ctx, request.send_counts, row), *_receive_from_all(ctx, request.recv_counts, row)],
    )


def _send(ctx: CallContext) -> Call:
    return _messages(
        ctx,
        [Message(nccl.ncclSend.unchecked, ctx.position("x"), 0, ctx.request.x.size, ctx.request.peer)],
    )


def _recv(ctx: CallContext) -> Call:
    return _messages(
        ctx,
        [Message(nccl.ncclRecv.unchecked, ctx.position("out"), 0, ctx.request.out.size, ctx.request.peer)],
    )


def _sendrecv(ctx: CallContext) -> Call:
    request, out = ctx.request, ctx.request.outputs()["out"]
    count = int(np.prod(out.shape, dtype=np.int64))
    sent = Message(nccl.ncclSend.unchecked, ctx.position("x"), 0, request.x.size, request.dest)
    return _messages(ctx, [sent, Message(nccl.ncclRecv.unchecked, ctx.position("out"), 0, count, request.source)])


MAKERS: dict[str, Callable[[CallContext], Call]] = {
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "send": _send,
    "recv": _recv,
    "sendrecv": _sendrecv,
}
