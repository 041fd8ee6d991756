"""Future: the outcome of a submitted request, which costs next to nothing until somebody waits for it.

supervisor.py makes futures, worker.py settles them, users wait for them in threads, in asyncio and with
`concurrent.futures.wait`. This room never touches a device and never runs a request.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from _thread import allocate_lock
from collections import deque
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar

from dispatch.errors import DeadlineExceeded, DependencyFailed, Undelivered

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator

    from dispatch.errors import DispatchError
    from dispatch.request import Request
    from dispatch.seat import Seat

__all__ = ["CANCELLED", "DELIVERED", "DONE", "FAILED", "MISSED", "Future", "LateFuture", "TimedFuture"]

# `Future._status`; 0 until it is settled.
DONE, FAILED, DELIVERED, CANCELLED = 1, 2, 3, 4  # DELIVERED: failed, and somebody has been told with what

MISSED = object()  # what `claim` gives to those who come too late

_making = threading.Lock()  # for the moment in which a future gets its `Waiting`


class Waiting:
    """Those who wait for one future; made when the first of them comes.

    Guarantees: `told` turns true once, under `lock`, and whoever turned it tells all that came before; whoever comes
    later sees it and waits for nothing. `lock` and `waiters` are what `concurrent.futures.wait` takes hold of.
    """

    __slots__ = ("callbacks", "gates", "lock", "told", "waiters")

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.told = False
        self.gates: list[Any] = []  # locks, each with a thread that waits for its release
        self.callbacks: list[Callable[[Future], object]] = []
        self.waiters: list[Any] = []  # of concurrent.futures

    def enter(self, gate: Any) -> bool:
        """Add a lock to be released; False where all has been told already."""
        with self.lock:
            if not self.told:
                self.gates.append(gate)
            return not self.told

    def leave(self, gate: Any) -> None:
        with self.lock:
            if gate in self.gates:
                self.gates.remove(gate)

    def tell(self, future: Future) -> list[BaseException]:
        """Wake all who wait and run the callbacks; returns what these raised."""
        with self.lock:
            if not self.told:
                for waiter in self.waiters:
                    _tell_waiter(waiter, future)
            self.told = True
        while self.gates:
            gate = self.gates[-1]  # taken off when it is open: an interrupted call is made once more
            with contextlib.suppress(RuntimeError):
                gate.release()
            self.gates.pop()
        errors: list[BaseException] = []
        while self.callbacks:
            callback = self.callbacks.pop(0)
            try:
                callback(future)
            except BaseException as error:  # noqa: BLE001  # whoever settles the future delivers it
                errors.append(error)
        return errors


def _tell_waiter(waiter: Any, future: Future) -> None:
    if future._status == CANCELLED:
        waiter.add_cancelled(future)
    elif future._status == DONE:
        waiter.add_result(future)
    else:
        waiter.add_exception(future)


class Future:
    """The outcome of a request: `result()`, or `await` it; only a supervisor makes one.

    A result means that the work is done: on a GPU the stream has passed it without a fault.

    Guarantees:
        It ends once. Deleting the slot `_request` claims a future, which succeeds for one caller only: the worker
        that starts it, `cancel()`, or whoever fails it unstarted. Only the one who claimed it settles it.
        Nobody is missed. Settling stores `_status` and then reads `_waiting`; who waits stores `_waiting` and then
        reads `_status`. So one of them sees the other, and where both do, `Waiting.told` lets one of them act.
        Callbacks run once: on the worker's thread, or at once in `add_done_callback` where it has ended before.
    """

    __slots__ = ("__weakref__", "_number", "_request", "_seat", "_status", "_value", "_waiting")
    _number: int  # with process isolation, in the order of sending
    _seat: Seat  # where it was placed
    _value: Any  # the result or the error; on a GPU the result is here before it may be read
    _request: Request  # until it is claimed

    def __init__(self, request: Request) -> None:
        self._request = request
        self._status = 0
        self._waiting: Waiting | None = None

    # -- what users ask -------------------------------------------------------------------------------------------
    def result(self, timeout: float | None = None) -> Any:
        """Wait and return the request's outputs; raises what it failed with.

        TimeoutError after `timeout` seconds, concurrent.futures.CancelledError for a cancelled one. A callback must
        not wait here for another request of its own supervisor: it is holding up the worker that would run it.
        """
        if not self._status:
            self._wait(timeout)
        if self._status == DONE:
            return self._value
        error = self._error()
        try:
            raise error
        finally:
            del error, self  # the traceback holds this frame: no cycle from the error through it

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return what the request failed with, or None; otherwise as `result`."""
        if not self._status:
            self._wait(timeout)
        if self._status == DONE:
            return None
        if self._status == CANCELLED:
            raise self._error()
        return self._error()

    def cancel(self) -> bool:
        """Take the request back if no worker has started it; whether it is cancelled now."""
        if self.claim() is MISSED:
            return self._status == CANCELLED
        errors = self.settle(CANCELLED, None)
        if errors:
            raise Undelivered(errors) from errors[0]
        return True

    def done(self) -> bool:
        """Whether it has ended: with a result, a failure, or cancelled."""
        return self._status != 0

    def cancelled(self) -> bool:
        return self._status == CANCELLED

    def running(self) -> bool:
        """Whether a worker has started it and it has not ended."""
        return not self._status and not self._unclaimed()

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call `callback(future)` when it ends, on the worker's thread; at once, and here, if it has ended.

        What a callback raises on a worker is delivered when the supervisor is closed.
        """
        waiting = self._open()
        with waiting.lock:
            if not waiting.told:
                waiting.callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in asyncio; cancelling the task that waits takes the request back if no worker has started it."""
        import asyncio

        if not self._status:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self.add_done_callback(partial(_Bell.of(loop).ring, waiter))
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._status == CANCELLED:
            raise asyncio.CancelledError
        return self.result()

    def __repr__(self) -> str:
        return f"<Future {self._state.partition('_')[0].lower()}>"

    # -- what workers and supervisors do --------------------------------------------------------------------------
    def claim(self) -> Any:
        """Take the request, which gives the right and the duty to settle; MISSED where somebody else has it."""
        try:
            request = self._request
            del self._request
        except AttributeError:
            return MISSED
        return request

    def settle(self, status: int, value: Any) -> list[BaseException]:
        """End it; returns what callbacks raised."""
        self._value = value
        self._status = status
        return self._waiting.tell(self) if self._waiting is not None else []

    @property
    def is_launched(self) -> bool:
        """Whether it has ended, or what comes behind it on its worker's stream runs after it.

        A result is stored as the request is enqueued. An error or None is stored just before the status: then it counts
        when it has ended, and none is lost for a result of None ends as well.
        """
        if self._status:
            return True
        value = getattr(self, "_value", None)
        return value is not None and not isinstance(value, BaseException)

    # -- waiting --------------------------------------------------------------------------------------------------
    def _unclaimed(self) -> bool:
        return hasattr(self, "_request")

    def _open(self) -> Waiting:
        waiting = self._waiting
        if waiting is None:
            with _making:
                if self._waiting is None:
                    made = Waiting()
                    with made.lock:  # so that nobody is added before it is known whether there is anything to wait for
                        self._waiting = made
                        made.told = self._status != 0
            waiting = self._waiting
        return waiting

    def _wait(self, timeout: float | None) -> None:
        left = self._seat.attend(self, timeout) if hasattr(self, "_seat") else timeout
        if self._status:
            return
        waiting = self._open()
        gate = allocate_lock()
        gate.acquire()
        if not waiting.enter(gate):
            return
        if gate.acquire(True, -1 if left is None else min(max(left, 0), threading.TIMEOUT_MAX)):
            return
        waiting.leave(gate)
        if not self._status:
            raise TimeoutError(f"the request has not ended after {timeout:g} s; it goes on")

    def _error(self) -> BaseException:
        if self._status == CANCELLED:
            from concurrent.futures import CancelledError

            return CancelledError("the request was cancelled before it started")
        self._status = DELIVERED
        error: BaseException = self._value
        return error

    # -- what `concurrent.futures.wait` and `as_completed` look at ------------------------------------------------
    @property
    def _condition(self) -> Any:
        return self._open().lock

    @property
    def _waiters(self) -> list[Any]:
        return self._open().waiters

    @property
    def _state(self) -> str:
        """The state as those who wait have been told it: theirs must not change while they hold the lock."""
        waiting = self._waiting
        if self._status and (waiting is None or waiting.told):
            return "CANCELLED_AND_NOTIFIED" if self._status == CANCELLED else "FINISHED"
        return "PENDING" if self._unclaimed() else "RUNNING"


class LateFuture(Future):
    """A future whose request may not start at any time; the slot `_due` is to it what `_request` is to others.

    A worker that finds no `_request` looks closer, so futures without conditions never pay for this. `after` holds the
    futures that it waits for, until it starts.
    """

    __slots__ = ("_due", "after")

    def __init__(self, request: Request, after: tuple[Future, ...] = ()) -> None:
        super().__init__(request)
        self.after = after
        self._due = request
        del self._request

    def refusal(self) -> DispatchError | None:
        """Why it must not start any more, if so."""
        return self.orphaned()

    def orphaned(self) -> DependencyFailed | None:
        """The error for one that waits for what will never be there."""
        for future in self.after:
            if future._status > DONE:
                how = "was cancelled" if future._status == CANCELLED else f"failed: {future._value!r}"
                error = DependencyFailed(f"it was not run, for a request that it was submitted to run after {how}")
                error.__cause__ = future._value
                return error
        return None

    def claim(self) -> Any:
        try:
            request = self._due
            del self._due
        except AttributeError:
            return MISSED
        return request

    def _unclaimed(self) -> bool:
        return hasattr(self, "_due")


class TimedFuture(LateFuture):
    """A future whose request may start only until a deadline."""

    __slots__ = ("deadline",)

    def __init__(self, request: Request, deadline: float, after: tuple[Future, ...] = ()) -> None:
        super().__init__(request, after)
        self.deadline = deadline

    @property
    def expired(self) -> bool:
        return monotonic() >= self.deadline

    def refusal(self) -> DispatchError | None:
        if self.expired:
            return DeadlineExceeded(
                "the time it was submitted with was over before a worker could start it; it was not run"
            )
        return super().refusal()


class _Bell:
    """Wakes one asyncio loop, once for all futures that ended since it last looked.

    Guarantees: `ring` appends and then reads `rung`; `answer` clears `rung` and then takes what was appended. So what
    was appended is either taken by the answer under way or rings anew.
    """

    bells: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Bell]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.ended: deque[asyncio.Future[None]] = deque()
        self.rung = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> _Bell:
        bell = cls.bells.get(loop)
        if bell is None:
            bell = cls.bells[loop] = cls(loop)  # a loop has one thread, and only that comes here with it
        return bell

    def ring(self, waiter: asyncio.Future[None], future: Future) -> None:
        """From any thread: let the loop see that `future` has ended."""
        self.ended.append(waiter)
        if self.rung:
            return
        self.rung = True
        loop = self.loop()
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self.answer)
        except RuntimeError:
            if not loop.is_closed():
                raise
            # A closed loop has no task left that could wait.

    def answer(self) -> None:
        """On the loop's thread: wake the tasks."""
        self.rung = False
        while self.ended:
            waiter = self.ended.popleft()
            if not waiter.done():
                waiter.set_result(None)


def _after_fork() -> None:
    """In a forked child the lock may be held by a thread that is not there."""
    global _making
    _making = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
