"""Circuit: when a worker breaks, the pool replaces it, or stops after too many breaks.

WorkerPool derives from it; limits.py counts. With a cooldown the open circuit half-opens, on the same device and
memory.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any

from dispatch.errors import WorkerFailed, error_text
from dispatch.logs import log
from dispatch.supervise.limits import LONGEST
from dispatch.supervise.priority_queue import PriorityQueue
from dispatch.supervise.queue import BROKEN, CANCELLING, CLOSING, OPEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.device import Device
    from dispatch.errors import DispatchError
    from dispatch.supervise.future import ConditionalFuture
    from dispatch.supervise.limits import RestartLimit
    from dispatch.supervise.queue import WorkerLike, WorkerQueue

__all__ = ["Circuit"]


class Circuit:
    """The restarts of a pool.

    Guarantees: if the system cannot start a thread, the replacement runs on the thread of the worker that broke. While
    the circuit is open nothing stays queued: `refusal` says why, and a thread that adds to a queue and then finds
    `WorkerQueue.draining` set ends what is in it.
    """

    device: Device
    lock: Any
    state: int
    restarts: int
    cooling_down: bool  # the circuit is open, and will half-open
    cooldown_gate: Any  # a lock, held; released to end a cooldown early, when the pool ends
    cooldown_ends: float
    refusal: DispatchError | None
    limit: RestartLimit
    queues: list[WorkerQueue]
    may_start: Callable[[ConditionalFuture], bool]
    end: Callable[[int, DispatchError], None]
    open_gates: Callable[[], None]

    def replace(self, worker: WorkerLike, defect: BaseException) -> bool:
        """Replace a worker that broke; returns False if the pool ends, or the worker broke once too often."""
        with self.lock:
            if self.state >= CANCELLING:
                return False
            within = self.cooling_down or self.limit.count()
        if not within:
            text = (
                f"the workers of {self.device} failed {self.limit.describe()}, the last time with {error_text(defect)}"
            )
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
            except RuntimeError:  # no more threads: the successor runs on this one
                successor.thread = worker.thread
                worker.successor = successor
            worker.queue.worker = successor
            self.restarts += 1
        log("worker replaced", {"device": self.device, "worker": worker.queue.index, "cause": defect})
        return True

    def open_circuit(self, text: str, cause: BaseException) -> None:
        """After one break too many: refuse new requests and fail the queued ones, permanently or for the cooldown."""
        broken = WorkerFailed(f"{text}; {self.limit.advice()}")
        broken.__cause__ = cause
        cooldown = self.limit.cooldown
        with self.lock:
            is_closing = self.state == CLOSING  # close() does not wait for a cooldown: queued requests fail
        if cooldown is None or is_closing:
            self.end(BROKEN, broken)
            return
        log("circuit opened", {"device": self.device, "cause": broken})
        with self.lock:
            if self.state == OPEN:
                self.refusal, self.cooling_down = broken, True
                self.cooldown_ends = monotonic() + cooldown
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
        while self.cooling_down and (seconds := self.cooldown_ends - monotonic()) > 0:
            if self.cooldown_gate.acquire(True, min(seconds, LONGEST)):  # the pool ends
                with suppress(RuntimeError):
                    self.cooldown_gate.release()  # for the next thread that waits
                return
        self.half_open()
