"""Circuit: what a pool does when a worker breaks: another takes its place, or, once too often, nothing is run any more.

WorkerPool is one, and limits.py counts. With a cooldown the open circuit half-opens, on the same device and memory.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import WorkerFailed, words
from dispatch.logs import log
from dispatch.supervise.limits import LONGEST
from dispatch.supervise.priority_queue import PriorityQueue
from dispatch.supervise.queue import BROKEN, CANCELLING, CLOSING, OPEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.device import Device
    from dispatch.errors import DispatchError
    from dispatch.supervise.future import LateFuture
    from dispatch.supervise.limits import RestartLimit
    from dispatch.supervise.queue import WorkerLike, WorkerQueue

__all__ = ["Circuit"]


class Circuit:
    """The restarts of a pool.

    Guarantees: a worker that breaks is replaced without a new thread where the system gives none. While the circuit is
    open nothing is queued: `refusal` says why, and what came too late is ended by whoever sees `WorkerQueue.draining`.
    """

    device: Device
    lock: Any
    state: int
    restarts: int
    cooling_down: bool  # the circuit is open, but for a while only
    cooled: Any  # a lock, held; released for those who wait for the end of that, where they shall not
    cools_until: float
    refusal: DispatchError | None
    limit: RestartLimit
    queues: list[WorkerQueue]
    may_start: Callable[[LateFuture], bool]
    end: Callable[[int, DispatchError], None]
    open_gates: Callable[[], None]

    def replace(self, worker: WorkerLike, defect: BaseException) -> bool:
        """Put a new worker where one broke; False where it ended anyway, or broke once too often."""
        with self.lock:
            if self.state >= CANCELLING:
                return False
            within = self.cooling_down or self.limit.count()
        if not within:
            text = f"the workers of {self.device} broke {self.limit.words()}, the last time with {words(defect)}"
            self.open_circuit(text, defect)
        if self.cooling_down:
            self._cool_down()
        with self.lock:
            if self.state >= CANCELLING:
                return False
            make: Any = type(worker)
            successor = make(worker.queue, self)
            try:
                successor.start()
            except RuntimeError:  # the system gives no more threads: this one goes on
                successor.thread = worker.thread
                worker.successor = successor
            worker.queue.worker = successor
            self.restarts += 1
        log("worker replaced", {"device": self.device, "worker": worker.queue.index, "cause": defect})
        return True

    def open_circuit(self, text: str, cause: BaseException) -> None:
        """What broke has broken once too often: take nothing, and fail what is queued; for a while, if asked to."""
        broken = WorkerFailed(f"{text}; {self.limit.advice()}")
        broken.__cause__ = cause
        cooldown = self.limit.cooldown
        with self.lock:
            is_closing = self.state == CLOSING  # who closes waits for no cooldown: what is queued fails
        if cooldown is None or is_closing:
            self.end(BROKEN, broken)
            return
        log("circuit opened", {"device": self.device, "cause": broken})
        with self.lock:
            if self.state == OPEN:
                self.refusal, self.cooling_down = broken, True
                self.cools_until = monotonic() + cooldown
            self.open_gates()
        if self.cooling_down:
            for queue in self.queues:
                queue.drain(self)  # type: ignore[arg-type]  # a WorkerPool, which is a WorkerOwner

    def half_open(self) -> None:
        """Take requests again, with one break left."""
        with self.lock:
            if self.state > OPEN or not self.cooling_down:
                return
            self.limit.half_open()
            self.limit.started()
            for queue in self.queues:
                if type(queue.pending) is PriorityQueue:
                    queue.pending.hold(self.may_start)
                queue.draining = False
            self.refusal, self.cooling_down = None, False

    def _cool_down(self) -> None:
        """Wait until the circuit half-opens, on the thread of a worker that broke."""
        while self.cooling_down and (left := self.cools_until - monotonic()) > 0:
            if self.cooled.acquire(True, min(left, LONGEST)):  # it ends instead
                with suppress(RuntimeError):
                    self.cooled.release()  # for the next who waits
                return
        self.half_open()
