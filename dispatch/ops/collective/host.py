"""Collectives on the host, by the communicator: MPI or gloo between processes, NumPy between threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.host_plan import store
from dispatch.core.request import Plan
from dispatch.errors import Refused
from dispatch.ops.collective.group import finish_call
from dispatch.ops.collective.threads import begin as begin_between_threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Operands
    from dispatch.core.row import Row
    from dispatch.device.layout import Array

__all__ = ["HostCollective", "plan"]

MAX_BYTES = 2**31 - 1  # the limit of MPI, which counts in an int


class HostCollective(Plan):
    """Begins a call, and waits for it at once or at the end of a group.

    `begin(request)` returns a function that waits for the call and returns the result, None on a rank without one.
    """

    __slots__ = ("_begin",)

    def __init__(self, row: Row, begin: Callable[[Any], Callable[[], Array | None]]) -> None:
        super().__init__(row, capture_safe=False)
        self._begin = begin

    def run(self, request: Any, outputs: Operands) -> None:
        wait = self._begin(request)

        def finish() -> None:
            result = wait()
            target = outputs.get("out", getattr(request, "out", None))
            if result is not None and target is not None:
                store(result, target)

        finish_call(finish)


def plan(request: Any, executor: object, row: Row) -> HostCollective:
    """The plan of a collective on the host; Refused for more bytes than MPI can count."""
    del executor  # a plan on the host needs no handle and no workspace
    if request.ranks.library == "gloo":
        from dispatch.ops.collective.gloo import begin as begin_by_gloo  # imported only when needed

        return HostCollective(row, begin_by_gloo)
    if request.ranks.library != "mpi":
        return HostCollective(row, begin_between_threads)
    from dispatch.ops.collective.mpi import begin  # imported only when needed

    largest = max((tensor.size * max(tensor.dtype.itemsize, 4) for _, tensor, _ in request.tensors()), default=0)
    if largest > MAX_BYTES:
        raise Refused(f"MPI transfers at most {MAX_BYTES} bytes per call, has {largest}: split it into several calls")
    return HostCollective(row, begin)
