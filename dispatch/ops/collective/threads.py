"""Collectives between threads of one process on the host: ranks exchange operands, and each computes its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.ops.collective.reference import call_signature, rank_input, rank_result, work_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.layout import Array
    from dispatch.libraries.threads.communicator import ThreadCommunicator

    Begin = Callable[[ThreadCommunicator, Any], Callable[[], Array | None]]

__all__ = ["begin"]


def begin(request: Any) -> Callable[[], Array | None]:
    """Begin a call; the returned function waits for the other ranks and returns this rank's result."""
    start: Begin = BEGIN.get(request.op, _exchange)
    return start(request.ranks, request)


def _exchange(comm: ThreadCommunicator, request: Any) -> Callable[[], Array | None]:
    reduces = hasattr(request, "reduce")
    part = rank_input(request, work_dtype(request.x.dtype) if reduces else None)
    wait = comm.exchange(call_signature(request), part)
    return lambda: rank_result(request, comm.rank, wait())


def _send(comm: ThreadCommunicator, request: Any) -> Callable[[], None]:
    x = np.array(request.x)
    comm.send(request.peer, _describe_array(x), x)
    return lambda: None


def _recv(comm: ThreadCommunicator, request: Any) -> Callable[[], Array]:
    out = request.out.layout
    return comm.receive(request.peer, f"{out.dtype.numpy}{list(out.shape)}")


def _sendrecv(comm: ThreadCommunicator, request: Any) -> Callable[[], Array]:
    x, out = np.array(request.x), request.outputs()["out"]
    comm.send(request.dest, _describe_array(x), x)
    return comm.receive(request.source, f"{out.dtype.numpy}{list(out.shape)}")


def _describe_array(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


BEGIN: dict[str, Begin] = {
    "send": _send,
    "recv": _recv,
    "sendrecv": _sendrecv,
}
