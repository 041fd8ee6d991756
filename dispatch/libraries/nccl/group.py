"""Groups of calls that NCCL begins together: those of several communicators of one thread, and sends with receives.

Inside a group, calls are neither waited for nor recorded; its end settles each communicator's calls. Follows
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/groups.html.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cudabind.sys import nccl
from dispatch.device.disposal import enqueueing_collectives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.libraries.nccl.communicator import NcclCommunicator

__all__ = ["Group", "current", "grouped"]


class Group(threading.local):
    """The group that this thread is in: its nesting depth, and the calls made in it."""

    depth = 0

    def __init__(self) -> None:
        self.calls: list[tuple[NcclCommunicator, ctypes.c_void_p, str, bool]] = []

    def add(self, communicator: NcclCommunicator, stream: ctypes.c_void_p, what: str, *, captured: bool) -> None:
        """Settle a call, and record its work, at the end of the group."""
        self.calls.append((communicator, ctypes.c_void_p(stream.value), what, captured))


current = Group()


@contextmanager
def grouped() -> Iterator[None]:
    """Context manager whose calls begin together when the outermost block ends, also if that raises."""
    if current.depth == 0:
        nccl.ncclGroupStart()
    current.depth += 1
    try:
        yield
    finally:
        current.depth -= 1
        if current.depth == 0:
            calls, current.calls = current.calls, []
            for communicator, *_ in calls:
                communicator.call_deadline = time.monotonic() + communicator.deadline
            with enqueueing_collectives():
                status = int(nccl.ncclGroupEnd.unchecked())
                for communicator, *_ in calls:
                    communicator.call_deadline = math.inf
                _settle(calls, status)


def _settle(calls: list[tuple[NcclCommunicator, ctypes.c_void_p, str, bool]], status: int) -> None:
    """Settle each communicator's calls, and record the last one on each of its streams."""
    for communicator in dict.fromkeys(each for each, *_ in calls):
        communicator.settle("ncclGroupEnd", status)
    last = {(communicator, stream.value): (call, captured) for communicator, stream, call, captured in calls}
    for (communicator, handle), (call, captured) in last.items():
        if not captured:
            with communicator.device.context:
                communicator.record_work(ctypes.c_void_p(handle), call)
