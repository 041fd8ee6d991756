"""Admission: the handling of requests when the queues are full: they wait, are refused, or displace the oldest one.

WorkerPool derives from it. The main thread runs this code, and Ctrl-C may come between any two steps: their order
ensures that nothing stays half done, or that the next caller finishes it. This module never runs a request.
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
    """Submitting to full queues of a pool.

    Guarantees: a thread that waits for room is woken, because it counts in `blocked` before it checks for room. A
    dropped request fails before it leaves its queue; if Ctrl-C comes in between, its worker skips it.
    """

    device: Device
    lock: Any
    blocked: int
    gates: list[Any]  # locks, each with a thread that waits for room
    dropped: int  # requests that failed in favour of newer ones
    withdrawn: int  # requests chosen to be dropped that were cancelled already

    @abstractmethod
    def check(self) -> None:
        """Raise if no requests are taken any more."""

    @abstractmethod
    def is_own_thread(self) -> bool:
        """Whether the calling thread is a worker's, which makes room and so cannot wait for it."""

    @abstractmethod
    def keep(self, future: Future) -> None:
        """Keep a future that is about to fail, until its error is read."""

    @abstractmethod
    def on_request_failed(self, future: Future, errors: list[BaseException]) -> None:
        """Keep a failed future until its error is read, and the errors of its callbacks."""

    def drop_oldest(self, queues: list[WorkerQueue], count: int) -> None:
        """Fail the `count` oldest queued requests in favour of newer ones; their callbacks run on this thread."""
        for queue in sorted(queues, key=lambda queue: len(queue.pending), reverse=True):
            for _ in range(min(count, len(queue.pending))):
                pending = queue.pending
                try:
                    future = pending.oldest() if type(pending) is PriorityQueue else pending[0]  # type: ignore[index]
                except IndexError:  # the worker has taken it
                    break
                count -= 1
                self._drop(queue, future)

    def _drop(self, queue: WorkerQueue, future: Future) -> None:
        """Fail a queued request, and only then take it out: after an interrupt the worker skips it."""
        text = (
            "dropped in favour of a newer request, because it was the oldest and"
            f" {self.full_message([queue], 'drop_oldest', None)}"
        )
        self.keep(future)
        is_mine, errors = future.withdraw(QueueFull(text))
        if not is_mine and not future._status:  # it is being sent
            return
        with suppress(ValueError):  # the worker has taken it
            queue.pending.remove(future)
            if not is_mine and future._status == CANCELLED:
                self._count(withdrawn=1)
        if is_mine:
            self._count(dropped=1)
            self.on_request_failed(future, errors)

    def _count(self, dropped: int = 0, withdrawn: int = 0) -> None:
        with self.lock:
            self.dropped += dropped
            self.withdrawn += withdrawn

    def wait_for_room(self, queues: list[WorkerQueue], when_full: str, deadline: float | None) -> WorkerQueue:
        """A queue with room, once there is one; QueueFull if waiting is not allowed or takes too long."""
        if when_full == "drop_oldest":
            queue = min(queues, key=lambda queue: len(queue.pending))
            if len(queue.pending) >= queue.limit:  # another queue may have been the full one
                self.drop_oldest([queue], 1)
            return queue
        while True:
            gate = allocate_lock()
            gate.acquire()
            with self.lock:
                self.gates.append(gate)
                self.blocked = len(self.gates)  # before the check below: a thread that makes room later wakes this one
            try:
                self.check()
                queue = min(queues, key=lambda queue: len(queue.pending))
                if len(queue.pending) < queue.limit:
                    return queue
                _wake_all(queues)  # a thread that filled a queue may have been interrupted before it woke the worker
                seconds = None if deadline is None else deadline - monotonic()
                if when_full == "raise" or self.is_own_thread() or (seconds is not None and seconds <= 0):
                    raise QueueFull(self.full_message(queues, when_full, deadline))
                gate.acquire(True, -1 if seconds is None else min(seconds, LONGEST))
            finally:
                with self.lock:
                    if gate in self.gates:
                        self.gates.remove(gate)
                    self.blocked = len(self.gates)

    def full_message(self, queues: list[WorkerQueue], when_full: str, deadline: float | None) -> str:
        where = f"worker {queues[0].index}" if len(queues) == 1 else f"all {len(queues)} workers"
        log("queue full", {"device": self.device, "workers": [queue.index for queue in queues]})
        why = ""
        if when_full == "block":
            why = (
                "; a worker's own thread cannot wait for a free place"
                if deadline is None
                else "; the timeout has expired"
            )
        return f"the queue of {where} of {self.device} is full ({queues[0].limit} requests each){why}"

    def make_room(self) -> None:
        with self.lock:
            self.open_gates()

    def open_gates(self) -> None:
        """Wake all threads that wait for room; the caller holds `lock`."""
        for gate in self.gates:
            with suppress(RuntimeError):  # opened before
                gate.release()
        self.gates.clear()
        self.blocked = 0


def _wake_all(queues: list[WorkerQueue]) -> None:
    for queue in queues:
        if queue.asleep:
            queue.wake()
