"""Admission: what becomes of requests that find the queues full: they wait, are refused, or displace the oldest.

WorkerPool is one. Main threads go through here, and Ctrl-C may come between any two steps: what is done is done in an
order that leaves nothing half done, or what the next who comes does again. This module never runs a request.
"""

from __future__ import annotations

from _thread import allocate_lock
from abc import ABC, abstractmethod
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import QueueFull
from dispatch.logs import log
from dispatch.supervise.future import CANCELLED
from dispatch.supervise.limits import LONGEST
from dispatch.supervise.priority_queue import PriorityQueue

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.supervise.future import Future
    from dispatch.supervise.queue import WorkerQueue

__all__ = ["Admission"]


class Admission(ABC):
    """The full queues of a pool.

    Guarantees: who waits for room is told of it, for it counts in `blocked` before it looks. What is dropped fails
    before it leaves its queue, so that an interrupt between the two leaves it where its worker passes over it.
    """

    device: Device
    lock: Any
    blocked: int
    gates: list[Any]  # locks, each with a thread that waits for room
    dropped: int  # by who submitted others: failed
    withdrawn: int  # and those that turned out to be cancelled

    @abstractmethod
    def check(self) -> None:
        """Raise why nothing is taken any more."""

    @abstractmethod
    def is_own_thread(self) -> bool:
        """Whether the calling thread is one that makes room, and so cannot wait for it."""

    @abstractmethod
    def keep(self, future: Future) -> None:
        """Keep a future that is about to fail, until somebody asks it."""

    @abstractmethod
    def failed(self, future: Future, errors: list[BaseException]) -> None:
        """Keep a failed future, and what its callbacks raised, until somebody asks."""

    def drop_oldest(self, queues: list[WorkerQueue], count: int) -> None:
        """Fail so many of the oldest requests that wait, in favour of newer ones; here run the callbacks of these."""
        for queue in sorted(queues, key=lambda queue: len(queue.pending), reverse=True):
            for _ in range(min(count, len(queue.pending))):
                pending = queue.pending
                try:
                    future = pending.oldest() if type(pending) is PriorityQueue else pending[0]  # type: ignore[index]
                except IndexError:  # the worker was quicker
                    break
                count -= 1
                self._drop(queue, future)

    def _drop(self, queue: WorkerQueue, future: Future) -> None:
        """Fail one that waits, and only then take it out: the worker passes over what an interrupt leaves there."""
        text = f"dropped for a newer request, for it was the oldest and {self.full([queue], 'drop_oldest', None)}"
        self.keep(future)
        is_mine, errors = future.withdraw(QueueFull(text))
        if not is_mine and not future._status:  # it is being sent
            return
        with suppress(ValueError):  # the worker was quicker
            queue.pending.remove(future)
            if not is_mine and future._status == CANCELLED:
                self._count(withdrawn=1)
        if is_mine:
            self._count(dropped=1)
            self.failed(future, errors)

    def _count(self, dropped: int = 0, withdrawn: int = 0) -> None:
        with self.lock:
            self.dropped += dropped
            self.withdrawn += withdrawn

    def wait_for_room(self, queues: list[WorkerQueue], when_full: str, deadline: float | None) -> WorkerQueue:
        """A queue with room, once there is one; QueueFull where that is not to be waited for, or took too long."""
        if when_full == "drop_oldest":
            queue = min(queues, key=lambda queue: len(queue.pending))
            if len(queue.pending) >= queue.limit:  # the one that was full may be another
                self.drop_oldest([queue], 1)
            return queue
        while True:
            gate = allocate_lock()
            gate.acquire()
            with self.lock:
                self.gates.append(gate)
                self.blocked = len(self.gates)  # before the look: whoever makes room then knows of this one
            try:
                self.check()
                queue = min(queues, key=lambda queue: len(queue.pending))
                if len(queue.pending) < queue.limit:
                    return queue
                _wake_all(queues)  # who filled the queue may have been interrupted before it said so
                left = None if deadline is None else deadline - monotonic()
                if when_full == "raise" or self.is_own_thread() or (left is not None and left <= 0):
                    raise QueueFull(self.full(queues, when_full, deadline))
                gate.acquire(True, -1 if left is None else min(left, LONGEST))
            finally:
                with self.lock:
                    if gate in self.gates:  # one that is left there is opened in vain
                        self.gates.remove(gate)
                    self.blocked = len(self.gates)

    def full(self, queues: list[WorkerQueue], when_full: str, deadline: float | None) -> str:
        where = f"worker {queues[0].index}" if len(queues) == 1 else f"all {len(queues)} workers"
        log("queue full", {"device": self.device, "workers": [queue.index for queue in queues]})
        why = ""
        if when_full == "block":
            why = "; a worker's own thread cannot wait for room" if deadline is None else "; the time to wait is over"
        return f"the queue of {where} of {self.device} is full ({queues[0].limit} requests each){why}"

    def make_room(self) -> None:
        with self.lock:
            self.open_gates()

    def open_gates(self) -> None:
        """With the lock held: have all look that wait for room."""
        for gate in self.gates:
            with suppress(RuntimeError):  # opened before
                gate.release()
        self.gates.clear()
        self.blocked = 0


def _wake_all(queues: list[WorkerQueue]) -> None:
    for queue in queues:
        if queue.asleep:
            queue.wake()
