"""QueueOwner: the part of a pool (process_pool.py) that the queue of a worker in a child uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dispatch.supervise.queue import WorkerOwner

if TYPE_CHECKING:
    import itertools

    from dispatch.supervise.future import TimedFuture
    from dispatch.supervise.process.messages import Connection

__all__ = ["QueueOwner"]


class QueueOwner(WorkerOwner, Protocol):
    device: Any  # a SharedHost or SharedCuda
    queues: list[Any]  # RemoteQueues
    numbers: itertools.count[int]  # one for each time that a request is sent
    names: itertools.count[int]  # one for each request that is defined in a child
    release_reader: bool

    def wake_monitor(self) -> None: ...
    def is_own_thread(self) -> bool: ...
    def listen(self, link: Connection, *, on: bool) -> None: ...
    def watch_deadline(self, future: TimedFuture, queue: Any) -> None: ...
