"""Future: the outcome of a submitted request. It is cheap: locks and lists are made only when something waits for it.

supervisor.py makes futures, worker.py settles them, users wait for them in threads, in asyncio and with
`concurrent.futures.wait`. This module never touches a device and never runs a request.
"""

from __future__ import annotations

import contextlib
import math
from _thread import allocate_lock
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, Protocol

from dispatch.checks import shown
from dispatch.core.request import R_co
from dispatch.errors import BadType, DeadlineExceeded, DependencyFailed, Undelivered, error_text
from dispatch.supervise.limits import check_seconds
from dispatch.supervise.waiters import CANCELLED, DELIVERED, DONE, FAILED, LoopWaker, WaitList, ensure_wait_list

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from dispatch.core.request import Request
    from dispatch.errors import DispatchError

__all__ = [
    "ALREADY_CLAIMED",
    "CANCELLED",
    "DELIVERED",
    "DONE",
    "FAILED",
    "TOO_LATE",
    "ConditionalFuture",
    "Future",
    "TimedFuture",
    "raise_errors",
]

LONGEST = 200  # characters of an error in a repr
ALREADY_CLAIMED = object()  # returned by `claim` if the request was claimed before
TOO_LATE = "its deadline passed before a worker could start it; it was not run"


class QueueLike(Protocol):
    """The part of the queue that a future was placed in (queue.py) which this module uses."""

    index: int
    worker: Any

    def help_wait(self, future: Future, timeout: float | None) -> float | None: ...


class Future(Generic[R_co]):
    """The outcome of a Request[R], an R: call `result()`, or `await` it. Only supervisors make futures.

    A result means that the work is done: on a GPU the stream has completed it without a fault.

    Guarantees:
        It ends once. Deleting the slot `_request` claims a future, which only one caller can do: the worker that
        starts it, or the thread that withdraws it before that. Only the caller that claimed it settles it.
        No waiter is missed. Settling stores `_status` and then reads `_wait_list`; a waiter stores `_wait_list` and
        then reads `_status`. So one of them sees the other.
        Callbacks run once: on the worker's thread, or at once in `add_done_callback` if it has ended before.
        Ctrl-C anywhere in here leaves it unchanged, ended, or withdrawn; the thread that finds a withdrawn one in the
        queue ends it. Claiming and recording who claimed are one atomic step of the interpreter.
    """

    __slots__ = ("__weakref__", "_number", "_queue", "_request", "_status", "_value", "_wait_list")
    _number: int  # with process isolation, in the order of sending
    _queue: QueueLike  # where it was placed
    _value: Any  # the result or the error; on a GPU the result is stored before it may be read
    _request: Request[R_co]  # until it is claimed
    _claimed_by: ClassVar[str] = "_request"  # the slot whose deletion claims it

    def __init__(self, request: Request[R_co]) -> None:
        self._request = request
        self._status = 0
        self._wait_list: WaitList | None = None

    # -- for users ------------------------------------------------------------------------------------------------
    def result(self, timeout: float | None = None) -> R_co:
        """Wait and return the request's outputs, or raise its error.

        TimeoutError after `timeout` seconds, which must be finite (None: no limit); concurrent.futures.CancelledError
        if it was cancelled. A callback must not wait here for another request of its supervisor, because the worker of
        that request may be running the callback.
        """
        if not self._status:
            self._wait(timeout)
        if self._status == DONE:
            return self._value  # type: ignore[no-any-return]  # a Request[R] gives an R
        error = self._error()
        try:
            raise error
        finally:
            del error, self  # the traceback refers to this frame: avoid a reference cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait and return the request's error, or None; otherwise as `result`."""
        if not self._status:
            self._wait(timeout)
        if self._status == DONE:
            return None
        if self._status == CANCELLED:
            raise self._error()
        return self._error()

    def cancel(self) -> bool:
        """Withdraw the request if no worker has started it; returns whether it is cancelled now.

        True: it never runs, and its outputs stay as they are. False: it runs, or has run, and ends as usual. A request
        counts as started once it is enqueued on a GPU's stream; with `isolation="process"`, once it was sent to the
        child, where it may still wait. Sent ahead are four requests of each worker that were submitted one by one, and
        up to 256 of a list, or while more than 15 are queued.
        """
        is_mine, errors = self.withdraw(None)
        raise_errors(errors)
        return is_mine or self._status == CANCELLED

    def done(self) -> bool:
        """Whether it has ended: with a result, a failure, or cancelled."""
        return self._status != 0

    def cancelled(self) -> bool:
        return self._status == CANCELLED

    def running(self) -> bool:
        """Whether a worker has started it and it has not ended."""
        return not self._status and not self._unclaimed()

    def add_done_callback(self, callback: Callable[[Future[R_co]], object]) -> None:
        """Call `callback(future)` when it ends, on the worker's thread; at once, and here, if it has ended.

        An error that a callback raises on a worker is raised when the supervisor is closed.
        """
        if not callable(callback):
            raise BadType("callback", f"{shown(callback)}, which is not callable", "a function of the future")
        wait_list = ensure_wait_list(self)
        wait_list.callbacks.append(callback)
        if self._status:
            try:
                wait_list.callbacks.remove(callback)
            except ValueError:  # the thread that settled the future has seen it, and calls it
                return
            callback(self)

    def __await__(self) -> Generator[Any, None, R_co]:
        """Wait in asyncio; cancelling the waiting task withdraws the request if no worker has started it."""
        import asyncio

        if not self._status:
            loop = asyncio.get_running_loop()
            waiter = loop.create_future()
            self.add_done_callback(partial(LoopWaker.of(loop).schedule, waiter))
            try:
                yield from waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        if self._status == CANCELLED:
            raise asyncio.CancelledError
        return self.result()

    def __reduce__(self) -> NoReturn:
        """Refuse copies and pickles: a copy would never be settled."""
        raise TypeError(f"a {type(self).__name__} cannot be copied or pickled: use its result()")

    def __repr__(self) -> str:
        """The state, on one line, with the error of a failed one; showing that does not count as reading it."""
        state = self._state.partition("_")[0].lower()
        if state == "finished" and self._status != DONE:
            text = " ".join(f"{type(self._value).__name__}: {error_text(self._value, str)}".split())
            state = f"failed: {text if len(text) <= LONGEST else text[:LONGEST] + '…'}"
        return f"<Future {state}>"

    # -- for workers and supervisors ------------------------------------------------------------------------------
    def claim(self) -> Any:
        """Take the request; the caller must then settle the future. ALREADY_CLAIMED if it was claimed before."""
        try:
            request = self._request
            del self._request
        except AttributeError:
            self._finish_withdrawal()
            return ALREADY_CLAIMED
        return request

    def unclaimed_request(self) -> Any:
        """The request, without claiming it; ALREADY_CLAIMED if it was claimed."""
        return getattr(self, self._claimed_by, ALREADY_CLAIMED)

    def claim_again(self) -> bool:
        """Claim it, for a caller that may have claimed it before an interrupt; returns False if it was withdrawn."""
        try:  # noqa: SIM105  # contextlib.suppress costs more than the rest
            delattr(self, self._claimed_by)
        except AttributeError:
            pass
        return self._wait_list is None or not self._wait_list.withdrawn

    def withdraw(self, cause: BaseException | None) -> tuple[bool, list[BaseException]]:
        """End it before it starts: cancelled, or failed with `cause`; returns whether that was in time, and errors of
        callbacks.

        After an interrupt it can be called again; otherwise the worker that finds it in its queue ends it.
        """
        request = self.unclaimed_request()
        if request is ALREADY_CLAIMED and (self._wait_list is None or not self._wait_list.withdrawn):
            return False, []
        wait_list = ensure_wait_list(self)
        if not wait_list.withdrawn:
            with contextlib.suppress(AttributeError):  # another thread has claimed it
                # Claiming and recording it is one atomic step; `request` is kept, so nothing is freed within it.
                wait_list.withdrawn.extend(zip(map(delattr, (self,), (self._claimed_by,)), (cause,), strict=True))
        if not wait_list.withdrawn:
            return False, []
        return wait_list.withdrawn[0][1] is cause, self._settle_withdrawn(wait_list)

    def _settle_withdrawn(self, wait_list: WaitList) -> list[BaseException]:
        if self._status:
            return wait_list.notify(self)
        cause = wait_list.withdrawn[0][1]
        return self.settle(CANCELLED if cause is None else FAILED, cause)

    def _finish_withdrawal(self) -> None:
        """End a future whose withdrawal was interrupted."""
        wait_list = self._wait_list
        if wait_list is not None and wait_list.withdrawn and not wait_list.is_notified:
            self._settle_withdrawn(wait_list)

    def settle(self, status: int, value: Any) -> list[BaseException]:
        """End it; returns the errors of callbacks."""
        self._value = value
        self._status = status
        return self._wait_list.notify(self) if self._wait_list is not None else []

    @property
    def is_launched(self) -> bool:
        """Whether it has ended, or is enqueued, so that later work on its worker's stream runs after it.

        A result is stored when the request is enqueued. An error, and a result of None, count only once the status is
        set, which is soon after.
        """
        if self._status:
            return True
        value = getattr(self, "_value", None)
        return value is not None and not isinstance(value, BaseException)

    # -- waiting --------------------------------------------------------------------------------------------------
    def _unclaimed(self) -> bool:
        return hasattr(self, self._claimed_by)

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None:
            timeout = check_seconds("timeout", timeout, -math.inf)
        seconds = self._queue.help_wait(self, timeout) if hasattr(self, "_queue") else timeout
        if self._status:
            return
        wait_list = ensure_wait_list(self)
        gate = allocate_lock()
        gate.acquire()
        try:
            wait_list.add_gate(gate)
            if self.done() or gate.acquire(True, -1 if seconds is None else max(seconds, 0)):
                return
        except BaseException:
            wait_list.remove_gate(gate)
            raise
        wait_list.remove_gate(gate)
        if not self._status:
            raise TimeoutError(f"the request has not completed after {timeout:g} s; it continues")

    def _error(self) -> BaseException:
        if self._status == CANCELLED:
            from concurrent.futures import CancelledError

            return CancelledError("the request was cancelled before it started")
        self._status = DELIVERED
        error: BaseException = self._value
        return error

    # -- the private attributes that `concurrent.futures.wait` and `as_completed` use -----------------------------
    @property
    def _condition(self) -> Any:
        wait_list = ensure_wait_list(self)
        # It may have ended while nothing waited: then notify. But `concurrent.futures` also reads this property to
        # release the lock, which this thread then holds: in that case the thread that settles the future does it later.
        if self._status and not wait_list.is_notified and not wait_list.lock.locked():
            wait_list.notify(self)
        return wait_list.lock

    @property
    def _waiters(self) -> list[Any]:
        return ensure_wait_list(self).waiters

    @property
    def _state(self) -> str:
        """The state that waiters were notified of: it must not change while `concurrent.futures` holds the lock."""
        wait_list = self._wait_list
        if self._status and (wait_list is None or wait_list.is_notified):
            return "CANCELLED_AND_NOTIFIED" if self._status == CANCELLED else "FINISHED"
        return "PENDING" if self._unclaimed() else "RUNNING"


class ConditionalFuture(Future[R_co]):
    """A future whose request may start only under conditions; it is in the slot `_conditional_request`, not `_request`.

    A worker that finds no `_request` checks the conditions, so futures without conditions cost nothing more. `after`
    has the futures that it depends on, until it starts.
    """

    __slots__ = ("_conditional_request", "after")
    _claimed_by = "_conditional_request"

    def __init__(self, request: Request[R_co], after: tuple[Future, ...] = ()) -> None:
        super().__init__(request)
        self.after = after
        self._conditional_request = request
        del self._request

    def refusal(self) -> DispatchError | None:
        """The error if it must not start any more, else None."""
        return self.dependency_error()

    def dependency_error(self) -> DependencyFailed | None:
        """The error if a future that it depends on has failed or was cancelled, else None."""
        for future in self.after:
            if future._status > DONE:
                how = "was cancelled" if future._status == CANCELLED else f"failed: {error_text(future._value)}"
                error = DependencyFailed(f"it was not run, because a request that it depends on (after=) {how}")
                error.__cause__ = future._value
                return error
        return None

    def claim(self) -> Any:
        try:
            request = self._conditional_request
            del self._conditional_request
        except AttributeError:
            self._finish_withdrawal()
            return ALREADY_CLAIMED
        return request


class TimedFuture(ConditionalFuture[R_co]):
    """A future whose request may start only until a deadline, which is a time of `monotonic`.

    `may_have_started`: in a child process that was lost; then it may run again at any time.
    """

    __slots__ = ("deadline", "may_have_started")

    def __init__(self, request: Request[R_co], deadline: float, after: tuple[Future, ...] = ()) -> None:
        super().__init__(request, after)
        self.deadline, self.may_have_started = deadline, False

    @property
    def expired(self) -> bool:
        return monotonic() >= self.deadline

    def refusal(self) -> DispatchError | None:
        if self.expired:
            return DeadlineExceeded(TOO_LATE)
        return super().refusal()


def raise_errors(errors: list[BaseException]) -> None:
    """Raise the errors of callbacks on the calling thread: an interrupt as it is, otherwise all as Undelivered."""
    for error in errors:
        if not isinstance(error, Exception):
            raise error
    if errors:
        raise Undelivered(errors) from errors[0]
