"""WorkerQueue: the queue, the counts and the wake-up of one worker; it outlives a worker that breaks.

supervisor.py appends to the queue, worker.py takes from it. The module also has the states of a supervisor and the
interface of a worker's owner. Nothing here runs a request.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from dispatch.supervise.future import CANCELLED
from dispatch.supervise.priority_queue import PriorityQueue

if TYPE_CHECKING:
    import threading

    from dispatch.device.device import Device
    from dispatch.errors import DispatchError
    from dispatch.supervise.future import Future

__all__ = ["BROKEN", "CANCELLING", "CLOSING", "OPEN", "WorkerLike", "WorkerOwner", "WorkerQueue", "clone_error"]

# `WorkerOwner.state`, in the order in which it may change.
OPEN, CLOSING, CANCELLING, BROKEN = 0, 1, 2, 3  # accepts requests; runs the queued ones; cancels them; fails them


class WorkerLike(Protocol):
    """The part of a worker (worker.py) that its queue and its owner use."""

    queue: WorkerQueue
    thread: threading.Thread
    executor: Any
    successor: Any  # a worker that takes over this one's thread

    def start(self) -> None: ...
    def in_flight(self) -> list[Future]: ...
    def help(self, future: Future) -> None: ...
    @property
    def is_current_thread(self) -> bool: ...


class WorkerOwner(Protocol):
    """The part of its owner (pool.py) that a worker uses."""

    device: Device
    state: int
    blocked: int  # threads that wait for room in a queue
    launch_lock: Any  # a lock, held while enqueueing
    completion: str  # how workers learn that a stream has passed an event: a key of completion.COMPLETIONS
    ordered: bool  # whether some requests depend on others, and wait for these to be enqueued

    def on_worker_opened(self, executor: Any, queue: WorkerQueue) -> None: ...
    def keep(self, future: Future) -> None: ...
    def on_request_failed(self, future: Future, errors: list[BaseException]) -> None: ...
    def on_callback_errors(self, errors: list[BaseException]) -> None: ...
    def on_device_lost(self) -> None: ...
    def replace(self, worker: WorkerLike, defect: BaseException) -> bool: ...
    def reason(self) -> DispatchError: ...
    def make_room(self) -> None: ...
    def on_enqueued(self) -> None: ...


def clone_error(error: DispatchError) -> DispatchError:
    """A copy of an error: each raise adds to the traceback of its object."""
    clone = type(error)(*error.args)
    clone.__cause__ = error.__cause__
    return clone


class WorkerQueue:
    """The queue and the counts of one worker, which outlive a worker that breaks.

    Guarantees: only the worker writes the counts. Any thread appends to `pending`; the worker takes from it, as do a
    thread that drops the oldest and, while it is `draining`, any thread. No wake-up is lost: the worker sets `asleep`
    and then checks `pending`; a thread that submits appends and then checks `asleep`. An extra wake-up only makes the
    worker check once more. `pending` becomes a PriorityQueue when first needed. It contains the same deque, so
    requests that are appended to that deque meanwhile are not lost.
    """

    __slots__ = (
        "asleep",
        "busy",
        "cancelled",
        "done",
        "draining",
        "failed",
        "gate",
        "index",
        "limit",
        "pending",
        "worker",
    )

    def __init__(self, index: int, limit: int) -> None:
        self.index, self.limit = index, limit
        self.pending: deque[Future] | PriorityQueue = deque()
        self.gate = allocate_lock()  # held, except between a wake-up and the moment when the worker acquires it
        self.gate.acquire()
        self.asleep = False
        self.draining = False  # no worker takes from it any more
        self.busy = self.done = self.failed = self.cancelled = 0
        self.worker: WorkerLike | None = None

    def wake(self) -> None:
        try:
            self.asleep = False
        finally:  # both, or the worker would never be woken
            try:  # noqa: SIM105  # contextlib.suppress costs as much as the wake-up
                self.gate.release()
            except RuntimeError:  # released already: the worker has not woken up yet
                pass

    def wait(self, seconds: float) -> None:
        """Sleep until something is queued, `wake` is called, or the time is over (-1: no limit)."""
        self.asleep = True
        if not self.pending:
            self.gate.acquire(True, seconds)
        self.asleep = False

    def wait_for_wakeup(self, seconds: float) -> None:
        """Sleep until `wake` is called or the time is over, whatever is queued."""
        self.gate.acquire(True, seconds)

    def watch_deadline(self, future: Future) -> None:
        """Called with a future that has a deadline; a subclass may ensure that it ends even if not taken in time."""

    def help_wait(self, future: Future, timeout: float | None) -> float | None:
        """Called by a thread that waits for a future: it may do work for it; returns the rest of the timeout."""
        if self.worker is not None:
            self.worker.help(future)
        return timeout

    def in_flight(self) -> list[Future]:
        """The futures taken from the queue and not settled yet."""
        return [] if self.worker is None else self.worker.in_flight()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or in flight; `busy` alone counts a GPU's batch only once all of it is enqueued."""
        return not (len(self.pending) or self.busy or self.in_flight())

    def drain(self, owner: WorkerOwner) -> None:
        """End everything in the queue; from now on a thread that adds to it does the same."""
        self.draining = True
        pending = self.pending
        if type(pending) is PriorityQueue:
            pending.release()
        while pending:
            try:
                future = pending[0] if type(pending) is deque else pending.first()  # type: ignore[union-attr]
            except IndexError:  # another thread that has just added to it drains it, too
                continue
            cause = None if owner.state == CANCELLING else owner.reason()
            if cause is not None:
                owner.keep(future)
            is_mine, errors = future.withdraw(cause)
            if not is_mine or cause is None:
                self.cancelled += future._status == CANCELLED
                owner.on_callback_errors(errors)
            else:
                self.failed += 1
                owner.on_request_failed(future, errors)
            with suppress(ValueError):  # taken out only now, so that after an interrupt the next call ends it
                pending.remove(future)
