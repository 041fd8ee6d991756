"""Collectives between processes on the host, by MPI's calls that do not wait.

MPI has no numbers of 8 and 16 bits: these are reduced in f32 and rounded once. What is only moved goes as bytes. A mean
is a sum, divided afterwards. Follows MPI 4.1, chapters 3 and 6, through mpi4py's calls with capital letters.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.libraries.mpi.communicator import mpi
from dispatch.ops.collective.group import is_open
from dispatch.ops.collective.reference import mean, part_of, reduced, same_on_all, work_for
from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device.layout import Array
    from dispatch.libraries.mpi.communicator import MpiCommunicator

    Ending = Callable[[], Array | None]

__all__ = ["begin"]

MESSAGE = 7  # the tag of messages between two ranks
WIDER = {np.dtype(np.int8): np.dtype(np.int32), np.dtype(np.uint8): np.dtype(np.uint32)}
BETWEEN_TWO = ("send", "recv", "sendrecv")  # which the other ranks know nothing of
OPS = {RedOp.PROD: "PROD", RedOp.MAX: "MAX", RedOp.MIN: "MIN"}  # the others are sums


def begin(request: Any) -> Ending:
    """Begin MPI's call; what comes back waits for it, and gives this rank's result.

    MPI takes what differs between ranks without a word, and gives wrong numbers. So the ranks compare their calls
    before; in a group, where nobody is waited for, before the result is handed out.
    """
    comm, start = request.ranks, BEGIN[request.op]
    if request.op in BETWEEN_TWO or comm.size == 1:
        return start(comm, request)
    compared = comm.compare(same_on_all(request))
    if not is_open():
        compared()
        return start(comm, request)
    ending = start(comm, request)

    def both() -> Array | None:
        try:
            compared()
        except BaseException:
            comm.abandon(ending)
            raise
        return ending()

    return both


# -- reductions -------------------------------------------------------------------------------------------------------
def _own(request: Any) -> Array:
    """This rank's operand as it goes into the reduction: in the working dtype, times its factor.

    Whole numbers of 8 bits go as wider ones: some of Open MPI's kernels have their sums end at the largest.
    """
    part = part_of(request, work_for(request.x.dtype))
    x: Any = reduced([part], RedOp.PREMUL_SUM) if request.how is RedOp.PREMUL_SUM else part.x
    return np.ascontiguousarray(x, WIDER.get(x.dtype))


def _op(request: Any) -> Any:
    return getattr(mpi(), OPS.get(request.how, "SUM"))


def _ended(request: Any, total: Array, size: int) -> Array:
    """A total that was summed up, as the reduction has it."""
    own = total.astype(work_for(request.x.dtype), copy=False)  # whole numbers wrap around
    return mean(own, size) if request.how is RedOp.AVG else own


def _all_reduce(comm: MpiCommunicator, request: Any) -> Ending:
    own = _own(request)
    total = np.empty_like(own)
    wait = comm.begin("all_reduce", lambda: comm.comm.Iallreduce(own, total, _op(request)), own, total)
    return _then(wait, lambda: _ended(request, total, comm.size))


def _reduce_to(comm: MpiCommunicator, request: Any) -> Ending:
    own, is_root = _own(request), comm.rank == request.root
    total = np.empty_like(own) if is_root else None
    start = partial(comm.comm.Ireduce, own, total, _op(request), request.root)
    wait = comm.begin("reduce_to", start, own, total)
    return _then(wait, lambda: None if total is None else _ended(request, total, comm.size))


def _reduce_scatter(comm: MpiCommunicator, request: Any) -> Ending:
    own = _own(request)
    counts, width = _rows(request, own, request.counts, comm.size)
    output = request.outputs()["out"]
    total = np.empty(output.shape, own.dtype)
    start = partial(comm.comm.Ireduce_scatter, own, total, [count * width for count in counts], _op(request))
    wait = comm.begin("reduce_scatter", start, own, total)
    return _then(wait, lambda: _ended(request, total, comm.size))


# -- moves ------------------------------------------------------------------------------------------------------------
def _raw(tensor: Any) -> Array:
    """The bytes of an operand, copied: nobody changes them while MPI reads."""
    return np.array(tensor, order="C").reshape(-1).view(np.uint8)


def _room(request: Any) -> tuple[Array, Callable[[], Array]]:
    """Memory for what comes, as bytes, and as the result."""
    output = request.outputs()["out"]
    made = np.empty(output.shape, output.dtype.numpy)
    return made.reshape(-1).view(np.uint8), lambda: made


def _rows(request: Any, array: Any, counts: Sequence[int] | None, size: int) -> tuple[list[int], int]:
    """How many rows are for each rank, and how many elements a row has."""
    del request
    rows = [1] * size if counts is None else list(counts)
    return rows, array.size // max(sum(rows), 1)


def _spans(counts: Sequence[int] | None, nbytes: int, size: int) -> tuple[list[int], list[int]]:
    """The bytes that are for each rank, and where they begin."""
    rows = [1] * size if counts is None else list(counts)
    row = nbytes // max(sum(rows), 1)
    sizes = [row * each for each in rows]
    return sizes, [sum(sizes[:place]) for place in range(size)]


def _then(wait: Callable[[], None], result: Callable[[], Array | None]) -> Ending:
    def ending() -> Array | None:
        wait()
        return result()

    return ending


def _broadcast(comm: MpiCommunicator, request: Any) -> Ending:
    raw = _raw(request.x)
    wait = comm.begin("broadcast", lambda: comm.comm.Ibcast([raw, mpi().BYTE], request.root), raw)
    made = raw.view(request.x.dtype.numpy).reshape(request.x.shape)
    return _then(wait, lambda: made)


def _all_gather(comm: MpiCommunicator, request: Any) -> Ending:
    sent, (room, made) = _raw(request.x), _room(request)
    into = [room, *_spans(request.counts, room.size, comm.size), mpi().BYTE]
    wait = comm.begin("all_gather", lambda: comm.comm.Iallgatherv([sent, mpi().BYTE], into), sent, room)
    return _then(wait, made)


def _gather(comm: MpiCommunicator, request: Any) -> Ending:
    sent = _raw(request.x)
    room: Array | None = None
    made: Callable[[], Array | None] = lambda: None  # noqa: E731  # of a rank that gets nothing
    into: list[Any] | None = None
    if comm.rank == request.root:
        room, made = _room(request)
        into = [room, *_spans(request.counts, room.size, comm.size), mpi().BYTE]
    wait = comm.begin("gather", lambda: comm.comm.Igatherv([sent, mpi().BYTE], into, request.root), sent, room)
    return _then(wait, made)


def _scatter(comm: MpiCommunicator, request: Any) -> Ending:
    room, made = _room(request)
    sent = None if request.x is None else _raw(request.x)
    out_of = None if sent is None else [sent, *_spans(request.counts, sent.size, comm.size), mpi().BYTE]
    start = partial(comm.comm.Iscatterv, out_of, [room, mpi().BYTE], request.root)
    return _then(comm.begin("scatter", start, sent, room), made)


def _all_to_all(comm: MpiCommunicator, request: Any) -> Ending:
    sent, (room, made) = _raw(request.x), _room(request)
    out_of = [sent, *_spans(request.send_counts, sent.size, comm.size), mpi().BYTE]
    into = [room, *_spans(request.recv_counts, room.size, comm.size), mpi().BYTE]
    wait = comm.begin("all_to_all", lambda: comm.comm.Ialltoallv(out_of, into), sent, room)
    return _then(wait, made)


def _send(comm: MpiCommunicator, request: Any) -> Ending:
    sent = _raw(request.x)
    start = partial(comm.comm.Isend, [sent, mpi().BYTE], request.peer, MESSAGE)
    return _then(comm.begin(f"send to rank {request.peer}", start, sent), lambda: None)


def _recv(comm: MpiCommunicator, request: Any) -> Ending:
    room, made = _room(request)
    start = partial(comm.comm.Irecv, [room, mpi().BYTE], request.peer, MESSAGE)
    return _then(comm.begin(f"recv from rank {request.peer}", start, room), made)


def _sendrecv(comm: MpiCommunicator, request: Any) -> Ending:
    sent, (room, made) = _raw(request.x), _room(request)
    into = partial(comm.comm.Irecv, [room, mpi().BYTE], request.source, MESSAGE)
    received = comm.begin(f"sendrecv from rank {request.source}", into, room)
    out_of = partial(comm.comm.Isend, [sent, mpi().BYTE], request.dest, MESSAGE)
    gone = comm.begin(f"sendrecv to rank {request.dest}", out_of, sent)
    return _then(lambda: (received(), gone())[0], made)


def _barrier(comm: MpiCommunicator, request: Any) -> Ending:
    del request
    return _then(comm.begin("barrier", comm.comm.Ibarrier), lambda: None)


BEGIN: dict[str, Callable[[Any, Any], Ending]] = {
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
