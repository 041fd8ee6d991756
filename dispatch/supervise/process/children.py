"""Children: the child process that works for a pool, those that stand by, and those that are about to be gone.

Only the pool's monitor thread starts and ends them; any thread may tell them of memory. child_process.py knows how a
child is started.
"""

from __future__ import annotations

import select
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from dispatch.errors import DispatchError
from dispatch.supervise.process import child_process as launch
from dispatch.supervise.process.child_process import Child, Standby

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.supervise.process.shared_device import SharedCuda, SharedHost

__all__ = ["Children"]

QUIET = 0.5  # seconds after a start before others are started to stand by: they would take its processor time


class Children:
    """The children of one pool.

    Guarantees: none is started but by the monitor thread, with which the kernel ends them. One that cannot be
    started to stand by costs nothing but that: it is tried again later.
    """

    def __init__(
        self,
        device: SharedHost | SharedCuda,
        streams: int,
        setup: Sequence[str],
        completion: str,
        spare: int,
        stop: Callable[[], bool],
    ) -> None:
        self._device, self._streams, self._setup, self._completion = device, streams, tuple(setup), completion
        self.standby = Standby(self._launch, spare, stop)
        self.present: Child | None = None
        self.ended: list[Child] = []  # killed and not yet gone
        self._starting = threading.Lock()  # held while a child is started and while it is told of other chunks
        self._refill_at = 0.0

    def all(self) -> list[Child]:
        return [*self.standby.children, *([] if self.present is None else [self.present])]

    def after_fork(self) -> None:
        """In a forked process: they are the parent's."""
        self._starting = threading.Lock()
        for child in self.all():
            child.disconnect()

    # -- memory -------------------------------------------------------------------------------------------------------
    def follow(self, done: int | None = None) -> bool:
        """Have all map the chunks that the device has, and no others; False where one cannot be told of it now."""
        with self._starting:
            children = self.all()
            for child in children:
                child.follow(self._device.chunks, done)
        return not any(child.behind for child in children)

    def catch_up(self, poll: select.epoll, full: int) -> None:
        """Tell those of chunks that had no room for it; `poll` says when the present one has, if it is `full` now."""
        for child in self.all():
            if child.behind:
                with self._starting:
                    child.follow(self._device.chunks)
                # Of the others, and of what else there may be no room for, the monitor thread looks at each tick.
                if child is self.present:
                    events = select.EPOLLIN | (select.EPOLLOUT if child.behind == full else 0)
                    with suppress(OSError):  # while it is being tried it is not in the poll
                        poll.modify(child.control.fileno(), events)

    # -- starting and ending -------------------------------------------------------------------------------------------
    def _launch(self) -> Child:
        with self._starting, launch.opening:
            return Child(self._device, self._streams, self._setup, self._completion)

    def take(self) -> Child:
        """Have a child that is ready be the present one. WorkerFailed or OSError where none can be had."""
        self.present = self.standby.take()
        self.follow()  # while it was being taken, it was nobody's child, and heard of no chunk
        self._refill_at = monotonic() + (0 if self.standby.spare else QUIET)
        return self.present

    def discard(self, *, wait: bool) -> None:
        """End the present child at once."""
        child, self.present = self.present, None
        if child is not None:
            child.kill(wait=wait)
            self.ended.append(child)

    def start(self, count: int) -> None:
        """Have so many get ready now, if that can be; who takes one is told where not."""
        with suppress(DispatchError, OSError, MemoryError):
            self.standby.start(count)

    def restock(self, *, now: bool = False) -> None:
        """What is done when there is time: let children stand by, and take note of those that have ended."""
        if not now and not (self._refill_at and monotonic() > self._refill_at):
            return
        self._refill_at = 0.0
        try:
            self.standby.refill()
        except (DispatchError, OSError, MemoryError):
            self._refill_at = monotonic() + QUIET
        self.ended = [child for child in self.ended if child.process.poll() is None]

    def end(self, *, kill: bool) -> None:
        """End all, and wait until they have."""
        child, self.present = self.present, None
        if child is not None:
            child.kill() if kill else child.close()
        self.standby.end()
        for child in self.ended:
            child.process.wait()
        self.ended.clear()
