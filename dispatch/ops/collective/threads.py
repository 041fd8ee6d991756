"""Collectives between threads of one process on the host: parts are handed over, and each rank makes its own result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.core.host_plan import store
from dispatch.core.request import Plan
from dispatch.ops.collective.group import finish
from dispatch.ops.collective.reference import combined, part_of, work_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array
    from dispatch.libraries.threads.meeting import ThreadCommunicator

__all__ = ["plan"]


class ThreadsPlan(Plan):
    """Takes part in a meeting; one plan serves all requests of its layouts, whose communicator is the same."""

    __slots__ = ()

    def run(self, request: Any, outputs: Operands) -> None:
        comm: ThreadCommunicator = request.ranks
        wait = BEGIN.get(request.op, _meet)(comm, request)

        def ending() -> None:
            result = wait()
            target = outputs.get("out", getattr(request, "out", None))
            if result is not None and target is not None:
                store(result, target)

        finish(ending)


def _call(request: Any) -> str:
    """What must be the same on all ranks, in words."""
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
    elif request.op == "scatter":
        words.append(str(request.out.dtype))
    return " ".join(words)


def _meet(comm: ThreadCommunicator, request: Any) -> Callable[[], Array | None]:
    reduces = hasattr(request, "reduce")
    part = part_of(request, work_for(request.x.dtype) if reduces else None)
    wait = comm.meet(_call(request), part)
    return lambda: combined(request, comm.rank, wait())


def _send(comm: ThreadCommunicator, request: Any) -> Callable[[], None]:
    x = np.array(request.x)
    comm.send(request.peer, _letter(x), x)
    return lambda: None


def _recv(comm: ThreadCommunicator, request: Any) -> Callable[[], Array]:
    out = request.out.layout
    return comm.receive(request.peer, f"{out.dtype.numpy}{list(out.shape)}")


def _sendrecv(comm: ThreadCommunicator, request: Any) -> Callable[[], Array]:
    x, out = np.array(request.x), request.outputs()["out"]
    comm.send(request.dest, _letter(x), x)
    return comm.receive(request.source, f"{out.dtype.numpy}{list(out.shape)}")


def _letter(array: Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


BEGIN: dict[str, Callable[[Any, Any], Callable[[], Array | None]]] = {
    "send": _send,
    "recv": _recv,
    "sendrecv": _sendrecv,
}


def plan(request: Any, executor: object, row: Row) -> ThreadsPlan:
    """The plan of a collective between threads."""
    del request, executor  # it needs neither
    return ThreadsPlan(row, capture_safe=False)
