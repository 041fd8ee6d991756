"""WorkerQueue: a worker's place in its supervisor, which outlives the worker: its queue, its counts and its sleep.

supervisor.py appends to the queue, worker.py takes from it. Here is also what a worker knows of its owner, and the
states of a supervisor. Nothing here runs a request.
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
OPEN, CLOSING, CANCELLING, BROKEN = 0, 1, 2, 3  # accepts; runs what is queued; cancels it; fails it


class WorkerLike(Protocol):
    """What its queue and its owner know of a worker (worker.py)."""

    queue: WorkerQueue
    thread: threading.Thread
    executor: Any
    successor: Any  # one that goes on with this one's thread

    def start(self) -> None: ...
    def in_flight(self) -> list[Future]: ...
    def help(self, future: Future) -> None: ...
    @property
    def is_here(self) -> bool: ...


class WorkerOwner(Protocol):
    """What a worker knows of its owner (pool.py)."""

    device: Device
    state: int
    blocked: int  # threads that wait for room in a queue
    launch_lock: Any  # a lock: who holds it enqueues
    completion: str  # how workers learn that a stream has passed an event: a key of completion.COMPLETIONS
    ordered: bool  # whether there are requests that may start once others are enqueued

    def opened(self, executor: Any, queue: WorkerQueue) -> None: ...
    def keep(self, future: Future) -> None: ...
    def failed(self, future: Future, errors: list[BaseException]) -> None: ...
    def callbacks_failed(self, errors: list[BaseException]) -> None: ...
    def lost(self) -> None: ...
    def replace(self, worker: WorkerLike, defect: BaseException) -> bool: ...
    def reason(self) -> DispatchError: ...
    def make_room(self) -> None: ...
    def launched(self) -> None: ...


def clone_error(error: DispatchError) -> DispatchError:
    """The same error as an object of its own, for each raise adds to the traceback of its object."""
    clone = type(error)(*error.args)
    clone.__cause__ = error.__cause__
    return clone


class WorkerQueue:
    """A worker's place: the queue and the counts, which outlive a worker that breaks.

    Guarantees: the counts are written by the worker alone. `pending` is appended to by any thread and taken from by the
    worker, by who drops the oldest, or by anyone while it is `draining`. A sleeper is woken: the worker sets `asleep`
    and then looks at `pending`, who submits appends and then looks at `asleep`; a wake-up too many only makes the
    worker look once more. `pending` becomes a PriorityQueue when first needed, around the very same deque: what is
    added to that is not lost.
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
        self.gate = allocate_lock()  # held, but for the moment between a wake-up and the worker's taking note of it
        self.gate.acquire()
        self.asleep = False
        self.draining = False  # no worker will come any more
        self.busy = self.done = self.failed = self.cancelled = 0
        self.worker: WorkerLike | None = None

    def wake(self) -> None:
        try:
            self.asleep = False
        finally:  # one without the other would be a worker that nobody wakes
            try:  # noqa: SIM105  # contextlib.suppress costs as much as the wake-up
                self.gate.release()
            except RuntimeError:  # released already: the worker has not yet taken note
                pass

    def wait(self, seconds: float) -> None:
        """Sleep until something is queued, somebody wakes the worker, or the time is over (-1: without end)."""
        self.asleep = True
        if not self.pending:
            self.gate.acquire(True, seconds)
        self.asleep = False

    def wait_for_wakeup(self, seconds: float) -> None:
        """Sleep until somebody wakes the worker, or the time is over, whatever is queued."""
        self.gate.acquire(True, seconds)

    def expect(self, future: Future) -> None:
        """See to it that a future with a deadline ends, though nobody takes it from the queue, if that is possible."""

    def help_wait(self, future: Future, timeout: float | None) -> float | None:
        """Do something for the end of a future that somebody waits for, if that is possible; returns what is left of
        the time."""
        if self.worker is not None:
            self.worker.help(future)
        return timeout

    def in_flight(self) -> list[Future]:
        """What has been taken from the queue and not been settled."""
        return [] if self.worker is None else self.worker.in_flight()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or has been taken: `busy` says of a GPU's batch only once all of it is enqueued."""
        return not (len(self.pending) or self.busy or self.in_flight())

    def drain(self, owner: WorkerOwner) -> None:
        """End what is left in the queue; from now on whoever adds to it does the same."""
        self.draining = True
        pending = self.pending
        if type(pending) is PriorityQueue:
            pending.release()
        while pending:
            try:
                future = pending[0] if type(pending) is deque else pending.first()  # type: ignore[union-attr]
            except IndexError:  # another thread, which has just added to it, is here too
                continue
            cause = None if owner.state == CANCELLING else owner.reason()
            if cause is not None:
                owner.keep(future)
            is_mine, errors = future.withdraw(cause)
            if not is_mine or cause is None:
                self.cancelled += future._status == CANCELLED
                owner.callbacks_failed(errors)
            else:
                self.failed += 1
                owner.failed(future, errors)
            with suppress(ValueError):  # taken out only now: an interrupted call leaves it to the next
                pending.remove(future)
