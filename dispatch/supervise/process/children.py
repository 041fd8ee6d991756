"""Children: the child process that works for a pool, its spare children, and those that are ending.

Only the pool's monitor thread starts and ends them; any thread may send them chunks of memory. child_process.py
implements how a child is started.
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

SPARE_DELAY = 0.5  # seconds after a start before spare children are started, which would compete for the CPU


class Children:
    """The children of one pool.

    Guarantees: only the monitor thread starts children, because the kernel ends them together with the thread that
    started them. A spare child that cannot be started is not an error; it is tried again later.
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
        self.current: Child | None = None
        self.ended: list[Child] = []  # killed, and not reaped yet
        self._starting = threading.Lock()  # held while a child is started, and while chunks are sent to one
        self._refill_at = 0.0

    def all(self) -> list[Child]:
        return [*self.standby.children, *([] if self.current is None else [self.current])]

    def after_fork(self) -> None:
        """In a forked process: close the connections; the children belong to the parent."""
        self._starting = threading.Lock()
        for child in self.all():
            child.disconnect()

    # -- memory -------------------------------------------------------------------------------------------------------
    def sync_chunks(self, done: int | None = None) -> bool:
        """Make all children map the chunks that the device has, and unmap others; False if one cannot be told now."""
        with self._starting:
            children = self.all()
            for child in children:
                child.sync_chunks(self._device.chunks, done)
        return not any(child.blocked_errno for child in children)

    def retry_chunks(self, poll: select.epoll, full: int) -> None:
        """Send chunks to children whose connections had no room before.

        If the current child's connection is still full (`blocked_errno` is `full`), `poll` reports when it has room.
        """
        for child in self.all():
            if child.blocked_errno:
                with self._starting:
                    child.sync_chunks(self._device.chunks)
                # For other children, and other reasons, the monitor thread tries again at each tick.
                if child is self.current:
                    events = select.EPOLLIN | (select.EPOLLOUT if child.blocked_errno == full else 0)
                    with suppress(OSError):  # during a recovery it is not in `poll`
                        poll.modify(child.control.fileno(), events)

    # -- starting and ending -------------------------------------------------------------------------------------------
    def _launch(self) -> Child:
        with self._starting, launch.opening:
            return Child(self._device, self._streams, self._setup, self._completion)

    def take(self) -> Child:
        """Make a ready child the current one. WorkerFailed or OSError if none can be started."""
        self.current = self.standby.take()
        self.sync_chunks()  # while it was being taken it was in no list, so it may lack chunks
        self._refill_at = monotonic() + (0 if self.standby.spare else SPARE_DELAY)
        return self.current

    def discard(self, *, wait: bool) -> None:
        """Kill the present child."""
        child, self.current = self.current, None
        if child is not None:
            child.kill(wait=wait)
            self.ended.append(child)

    def start(self, count: int) -> None:
        """Let `count` children get ready now, if possible; `take` raises the errors."""
        with suppress(DispatchError, OSError, MemoryError):
            self.standby.start(count)

    def restock(self, *, now: bool = False) -> None:
        """Start missing spare children, and reap those that have ended; called when there is time."""
        if not now and not (self._refill_at and monotonic() > self._refill_at):
            return
        self._refill_at = 0.0
        try:
            self.standby.refill()
        except (DispatchError, OSError, MemoryError):
            self._refill_at = monotonic() + SPARE_DELAY
        self.ended = [child for child in self.ended if child.process.poll() is None]

    def end(self, *, kill: bool) -> None:
        """End all, and wait until they have."""
        child, self.current = self.current, None
        if child is not None:
            child.kill() if kill else child.close()
        self.standby.end()
        for child in self.ended:
            child.process.wait()
        self.ended.clear()
