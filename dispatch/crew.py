"""Crew: the workers of one supervisor, and the policy over them: who gets a request, what a defect or a fault leads to.

supervisor.py is what users hold; worker.py has the threads, which know the crew and not the supervisor, so that one
that is dropped can end. This room never runs a request and never touches a stream.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
import weakref
from collections import deque
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any

from dispatch import trace
from dispatch.errors import BadRequest, Closed, DeviceFault, DispatchError, QueueFull, Undelivered, WorkerFailed
from dispatch.future import DELIVERED, DONE, FAILED, MISSED, LateFuture
from dispatch.levels import PRIORITIES, Levels
from dispatch.seat import BROKEN, CANCELLING, CLOSING, OPEN, Seat, again
from dispatch.worker import CudaWorker, HostWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.device import Device
    from dispatch.future import Future
    from dispatch.worker import Worker

__all__ = ["Crew"]

SAMPLES = 1024  # latencies that are kept
PRUNE = 1024  # failures, from which on those that were asked for are sorted out
AT_EXIT = 2.0  # seconds that an interpreter that exits waits for workers that nobody closed

_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


class Crew:
    """The workers of one supervisor and the policy over them: what the threads hold, so that they do not hold it.

    Guarantees: `ending` only grows. `refusal` is set before the last worker looks at its queue for the last time, and
    who submits looks at `Seat.vacant` after adding to it: what comes too late is ended by whoever sees that it did.
    Queues are not locked: as many threads as submit at the same instant may exceed a queue's size by one each.
    """

    def __init__(
        self,
        device: Device,
        streams: int,
        queue_size: int,
        max_restarts: int,
        max_seconds: float,
        completion: str = "poll",
    ) -> None:
        self.device = device
        self.completion = completion
        self.ending = OPEN
        self.refusal: DispatchError | None = None
        self.turn = threading.Lock()
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.blocked = 0
        self.holding = False
        self.dropped = self.withdrawn = 0  # by who submitted others: failed, and cancelled before
        self.tickets = itertools.count()
        self.homes: dict[Any, Seat] = {}  # lane -> seat
        self.samples: deque[float] = deque(maxlen=SAMPLES)
        self.restarts = 0
        self._max_restarts, self._max_seconds = max_restarts, max_seconds
        self._breaks: deque[float] = deque()
        self._failures: list[Future] = []
        self._prune_at = PRUNE
        self._errors: list[BaseException] = []  # of callbacks
        self.seats = self.make_seats(streams, queue_size)
        _crews.add(self)
        device.supervisors.add(self)

    generation = 1

    def watch_generation(self, observer: Callable[[int], object]) -> None:
        """Threads are of one generation."""

    def make_seats(self, streams: int, queue_size: int) -> list[Seat]:
        """The places, with their workers in them."""
        kind = HostWorker if self.device.is_host else CudaWorker
        seats = [Seat(index, queue_size) for index in range(streams)]
        for seat in seats:
            seat.worker = kind(seat, self)
        return seats

    def start(self) -> None:
        """Have the workers begin."""
        for seat in self.seats:
            if seat.worker is not None:
                seat.worker.start()

    # -- placing --------------------------------------------------------------------------------------------------
    def place(self, ticket: int, seats: list[Seat]) -> Seat:
        """The seat with the least to do; in turn among equals."""
        best = seats[ticket % len(seats)]
        least = len(best.items) + best.busy
        if least:
            for seat in seats:
                load = len(seat.items) + seat.busy
                if load < least:
                    best, least = seat, load
        return best

    def shares(self, count: int, seats: list[Seat]) -> list[tuple[Seat, int]]:
        """How many of `count` requests go where, so that all have as much to do as they can; no more than fit."""
        loads = {seat: len(seat.items) + seat.busy for seat in seats}
        lower = seats
        while True:
            level = -(-(count + sum(loads[seat] for seat in lower)) // len(lower))
            below = [seat for seat in lower if loads[seat] <= level]
            if len(below) == len(lower):
                break
            lower = below
        shares = []
        for seat in lower:
            share = min(level - loads[seat], count, max(seat.limit - len(seat.items), 0))
            count -= share
            if share:
                shares.append((seat, share))
        return shares

    def rank(self, seat: Seat, futures: Sequence[Future], priority: Any) -> None:
        """Add futures that have a priority or wait for others; those of a seat that never had any cost nothing."""
        if not isinstance(priority, int) or priority not in PRIORITIES:
            raise BadRequest("priority", repr(priority), " or ".join(map(str, PRIORITIES)), "the smaller goes first")
        with self.lock:
            if type(seat.items) is not Levels:
                seat.items = Levels(seat.items, self.may_start)  # type: ignore[arg-type]
        for future in futures:
            if isinstance(future, LateFuture):
                for other in future.after:
                    if not other._status:
                        self.holding = True
                        other.add_done_callback(lambda _: seat.wake())
        seat.items.put(futures, priority)

    def may_start(self, future: LateFuture) -> bool:
        """Whether all that a future waits for has ended, or is enqueued where another worker can wait for its event."""
        return all(other._status or self._is_enqueued(other) for other in future.after)

    def _is_enqueued(self, other: Future) -> bool:
        return getattr(other, "_seat", None) in self.seats and other.is_launched

    def launched(self) -> None:
        """A worker has enqueued something: wake those that waited for that."""
        for seat in self.seats:
            if seat.asleep and type(seat.items) is Levels and seat.items:
                seat.wake()

    def drop_oldest(self, seats: list[Seat], count: int) -> None:
        """Fail so many of the oldest requests that wait, in favour of newer ones; here run the callbacks of these."""
        for seat in sorted(seats, key=lambda seat: len(seat.items), reverse=True):
            for _ in range(min(count, len(seat.items))):
                items = seat.items
                try:
                    future = items.drop() if type(items) is Levels else items.popleft()
                except IndexError:  # the worker was quicker
                    break
                count -= 1
                if future.claim() is MISSED:
                    self._count(withdrawn=1)
                    continue
                text = (
                    f"dropped for a newer request, for it was the oldest and {self.full([seat], 'drop_oldest', None)}"
                )
                self._count(dropped=1)
                self.failed(future, future.settle(FAILED, QueueFull(text)))

    def _count(self, dropped: int = 0, withdrawn: int = 0) -> None:
        with self.lock:
            self.dropped += dropped
            self.withdrawn += withdrawn

    def wait_for_room(self, seats: list[Seat], when_full: str, deadline: float | None) -> Seat:
        """A seat with room, once there is one; QueueFull where that is not to be waited for, or took too long."""
        if when_full == "drop_oldest":
            seat = min(seats, key=lambda seat: len(seat.items))
            self.drop_oldest([seat], 1)
            return seat
        with self.room:
            self.blocked += 1
            try:
                while True:
                    self.check()
                    seat = min(seats, key=lambda seat: len(seat.items))
                    if len(seat.items) < seat.limit:
                        return seat
                    left = None if deadline is None else deadline - monotonic()
                    if when_full == "raise" or self.is_own_thread() or (left is not None and left <= 0):
                        raise QueueFull(self.full(seats, when_full, deadline))
                    self.room.wait(left)
            finally:
                self.blocked -= 1

    def full(self, seats: list[Seat], when_full: str, deadline: float | None) -> str:
        where = f"worker {seats[0].index}" if len(seats) == 1 else f"all {len(seats)} workers"
        trace.log("queue full", {"device": self.device, "workers": [seat.index for seat in seats]})
        why = ""
        if when_full == "block":
            why = "; a worker's own thread cannot wait for room" if deadline is None else "; the time to wait is over"
        return f"the queue of {where} of {self.device} is full ({seats[0].limit} requests each){why}"

    def make_room(self) -> None:
        with self.room:
            self.room.notify_all()

    # -- what workers say (worker.Keeper) -------------------------------------------------------------------------
    def opened(self, lane: Any, seat: Seat) -> None:
        with self.lock:
            self.homes = {**{key: other for key, other in self.homes.items() if other is not seat}, lane: seat}

    def failed(self, future: Future, errors: list[BaseException]) -> None:
        """Keep a failed future until somebody asks it."""
        error = future._value
        trace.log("request failed", {"device": self.device, "error": type(error).__name__, "words": error})
        with self.lock:
            self._failures.append(future)
            self._errors += errors
            if len(self._failures) >= self._prune_at:
                self._failures = [kept for kept in self._failures if kept._status == FAILED]
                self._prune_at = max(PRUNE, 2 * len(self._failures))

    def callbacks_failed(self, errors: list[BaseException]) -> None:
        with self.lock:
            self._errors += errors

    def lost(self) -> None:
        """The device is lost: nothing more is taken, and what is queued fails."""
        if self.device.fault is not None:
            self.end(BROKEN, again(self.device.fault))

    def replace(self, worker: Worker, defect: BaseException) -> bool:
        """Put a new worker where one broke; False where it ended anyway, or broke once too often."""
        now = monotonic()
        with self.lock:
            if self.ending >= CANCELLING:
                return False
            self._breaks.append(now)
            while self._breaks[0] < now - self._max_seconds:
                self._breaks.popleft()
            if len(self._breaks) <= self._max_restarts:
                try:
                    successor = type(worker)(worker.seat, self)
                    successor.start()
                except RuntimeError as error:  # the system gives no more threads
                    error.__cause__ = defect
                    defect = error
                else:
                    worker.seat.worker = successor
                    self.restarts += 1
                    trace.log("worker replaced", {"device": self.device, "worker": worker.seat.index, "cause": defect})
                    return True
        broken = WorkerFailed(
            f"the workers of {self.device} broke {len(self._breaks)} times in {self._max_seconds:g} s"
            f" (max_restarts={self._max_restarts}), the last time with {defect!r}; make a new supervisor"
        )
        broken.__cause__ = defect
        self.end(BROKEN, broken)
        return False

    def reason(self) -> DispatchError:
        """Why what is queued will not be run."""
        return again(self.refusal or Closed(f"the supervisor of {self.device} has ended"))

    def sample(self, start: float, future: Future) -> None:
        if future._status == DONE:
            self.samples.append(perf_counter() - start)

    # -- ending ---------------------------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise why nothing is taken any more."""
        if self.refusal is not None:
            raise again(self.refusal)

    def end(self, ending: int, refusal: DispatchError) -> None:
        """Take nothing more; `ending` says what becomes of what is queued."""
        if ending == BROKEN > self.ending:
            event = "device lost" if isinstance(refusal, DeviceFault) else "circuit opened"
            trace.log(event, {"device": self.device, "cause": refusal})
        with self.room:
            if self.refusal is None or ending == BROKEN > self.ending:
                self.refusal = refusal
            self.ending = max(self.ending, ending)
            self.room.notify_all()
        for seat in self.seats:
            seat.wake()

    def finish(self, why: str = "with its device") -> None:
        """Run what is queued, and end; the device asks for this before it is closed."""
        self.end(CLOSING, Closed(f"the supervisor of {self.device} was closed {why}; make a new one"))
        self.join()

    def is_own_thread(self) -> bool:
        here = threading.current_thread()
        return any(seat.worker is not None and seat.worker.thread is here for seat in self.seats)

    def join(self, seconds: float | None = None) -> None:
        """Wait for all workers, their successors included; one of them cannot, and does not."""
        if self.is_own_thread():
            return
        deadline = None if seconds is None else monotonic() + seconds
        for seat in self.seats:
            worker = None
            while worker is not seat.worker and seat.worker is not None:
                worker = seat.worker
                worker.thread.join(None if deadline is None else max(deadline - monotonic(), 0))

    def abandon(self) -> None:
        """The supervisor is gone and was not closed. May come at any moment, in any thread, so it takes no lock."""
        if self.ending > OPEN:
            return
        self.refusal = Closed("the supervisor is gone")
        self.ending = CANCELLING
        for seat in self.seats:
            seat.wake()
        warnings.warn(
            f"a supervisor of {self.device} was dropped without close(); what was queued is cancelled",
            ResourceWarning,
            2,
        )

    def undelivered(self) -> Undelivered | None:
        """What failed and nobody asked for, which is delivered herewith."""
        with self.lock:
            futures = [future for future in self._failures if future._status == FAILED]
            errors = [future._value for future in futures] + self._errors
            self._failures, self._errors = [], []
        for future in futures:
            future._status = DELIVERED
        return Undelivered(errors) if errors else None

    def after_fork(self) -> None:
        """In a forked child: its threads are not there, and a CUDA context does not survive a fork."""
        self.lock = threading.Lock()
        self.room = threading.Condition(self.lock)
        self.turn = threading.Lock()
        self.refusal = Closed(
            f"this supervisor of {self.device} was made before os.fork(), which leaves its threads and the CUDA context"
            " behind; make it in the child, and start children with the 'spawn' method"
        )
        self.ending = BROKEN
        for seat in self.seats:
            left = [*seat.items, *seat.in_hand()]
            seat.items.clear()
            for future in left:
                future.claim()
                future._value, future._status = self.reason(), DELIVERED  # who waited for it is not in this process
        self._failures, self._errors = [], []


def _after_fork() -> None:
    for crew in list(_crews):
        crew.after_fork()


def _at_exit() -> None:
    """Let workers that nobody closed end before the interpreter does: cancel what is queued, wait a little."""
    crews = [crew for crew in _crews if crew.ending < CANCELLING]
    for crew in crews:
        crew.end(CANCELLING, Closed("the interpreter exits"))
    for crew in crews:
        crew.join(AT_EXIT / len(crews))


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
