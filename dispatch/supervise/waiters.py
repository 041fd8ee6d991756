"""WaitList: the waiters of one future, in threads, in asyncio or with `concurrent.futures`.

future.py makes a WaitList for the first waiter; the thread that settles the future wakes them. This module does
not depend on requests, workers or devices.
"""

from __future__ import annotations

import os
import threading
import weakref
from _thread import allocate_lock
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


__all__ = [
    "CANCELLED",
    "DELIVERED",
    "DONE",
    "FAILED",
    "LatencyCallback",
    "LoopWaker",
    "Signal",
    "WaitList",
    "ensure_wait_list",
]

# `Future._status`; 0 until it is settled.
DONE, FAILED, DELIVERED, CANCELLED = 1, 2, 3, 4  # DELIVERED: failed, and the error was read

_creation_lock = threading.Lock()  # held while a future gets its `WaitList`


class FutureLike(Protocol):
    """The part of a future that this module uses."""

    _status: int
    _wait_list: WaitList | None


class WaitList:
    """The waiters and callbacks of one future.

    Guarantees: a waiter adds itself here and then reads the future's status; settling stores the status and then calls
    `notify`. So one of them sees the other. `notify` may be called again, by any thread, to finish an interrupted call:
    releasing a gate twice does no harm, each callback is taken by one call only, and waiters of `concurrent.futures`
    are notified once, under `lock`, which `is_notified` records.
    """

    __slots__ = ("callbacks", "gates", "is_notified", "lock", "waiters", "withdrawn")

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.is_notified = False
        self.gates: list[Any] = []  # locks; a thread waits for the release of each
        self.callbacks: deque[Callable[[Any], object]] = deque()
        self.waiters: list[Any] = []  # waiters of concurrent.futures
        # One entry once the future was withdrawn; its second item is the error, or None for a cancelled future.
        self.withdrawn: list[tuple[None, BaseException | None]] = []

    def add_gate(self, gate: Any) -> None:
        """Add a lock, which `notify` releases."""
        with self.lock:
            self.gates.append(gate)

    def remove_gate(self, gate: Any) -> None:
        with self.lock:
            if gate in self.gates:
                self.gates.remove(gate)

    @property
    def is_interruptible(self) -> bool:
        """Whether only threads and latency callbacks wait, for which an interrupted `notify` may safely be repeated."""
        return not self.waiters and all(type(callback) is LatencyCallback for callback in self.callbacks.copy())

    def notify(self, future: FutureLike) -> list[BaseException]:
        """Wake all waiters and run the callbacks; returns the errors of callbacks."""
        with self.lock:
            if not self.is_notified:
                for waiter in self.waiters:
                    _notify_waiter(waiter, future)
            self.is_notified = True
            for gate in self.gates:
                try:  # noqa: SIM105  # contextlib.suppress costs as much as the wake-up
                    gate.release()
                except RuntimeError:  # noqa: PERF203  # opened before
                    pass
            self.gates.clear()
        return self._run_callbacks(future) if self.callbacks else []

    def _run_callbacks(self, future: FutureLike) -> list[BaseException]:
        """Run the callbacks, each once; returns their errors, and an interrupt that came between two of them."""
        errors: list[BaseException] = []
        while True:
            try:
                for callback in iter(self.callbacks.popleft, None):
                    try:
                        callback(future)
                    except BaseException as error:  # noqa: BLE001, PERF203  # returned to the settling thread
                        errors.append(error)
            except IndexError:  # noqa: PERF203
                return errors
            except BaseException as error:  # noqa: BLE001  # Ctrl-C: still call the others
                errors.append(error)


class Signal:
    """A threading.Event for a single waiting thread, in which an interrupt never leaves a lock held."""

    __slots__ = ("_gate", "_is_set")

    def __init__(self) -> None:
        self._is_set = False
        self._gate = allocate_lock()
        self._gate.acquire()

    def set(self) -> None:
        self._is_set = True
        try:  # noqa: SIM105
            self._gate.release()
        except RuntimeError:  # it is set already
            pass

    def clear(self) -> None:
        self._is_set = False
        self._gate.acquire(False)

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float) -> None:
        """Wait until it is set, or for `seconds`."""
        if not self._is_set:
            self._gate.acquire(True, seconds)


class LatencyCallback(partial[object]):
    """A callback that takes a time, and may be interrupted and called again."""


def _notify_waiter(waiter: Any, future: FutureLike) -> None:
    if future._status == CANCELLED:
        waiter.add_cancelled(future)
    elif future._status == DONE:
        waiter.add_result(future)
    else:
        waiter.add_exception(future)


def ensure_wait_list(future: FutureLike) -> WaitList:
    """The future's WaitList; created if it has none."""
    if future._wait_list is None:
        with _creation_lock:
            if future._wait_list is None:
                future._wait_list = WaitList()
    return future._wait_list


class LoopWaker:
    """Wakes one asyncio event loop, once for all futures that have ended since it last woke.

    Guarantees: `schedule` appends and then reads `is_scheduled`; `wake_tasks` clears `is_scheduled` and then takes what
    was appended. So an appended waiter is either taken by the present call of `wake_tasks` or causes another one.
    """

    wakers: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]] = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.ended: deque[asyncio.Future[None]] = deque()
        self.is_scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> LoopWaker:
        waker = cls.wakers.get(loop)
        if waker is None:
            waker = cls.wakers[loop] = cls(loop)  # no lock: only the loop's own thread calls this for it
        return waker

    def schedule(self, waiter: asyncio.Future[None], future: FutureLike) -> None:
        """From any thread: tell the loop that `future` has ended."""
        self.ended.append(waiter)
        if self.is_scheduled:
            return
        self.is_scheduled = True
        loop = self.loop()
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self.wake_tasks)
        except BaseException:
            self.is_scheduled = False  # nothing was scheduled: the next call tries again
            if not loop.is_closed():
                raise
            # A closed loop has no waiting task left.

    def wake_tasks(self) -> None:
        """On the loop's thread: wake the tasks."""
        self.is_scheduled = False
        while self.ended:
            waiter = self.ended.popleft()
            if not waiter.done():
                waiter.set_result(None)


def _after_fork() -> None:
    """In a forked child the lock may be held by a thread that does not exist."""
    global _creation_lock
    _creation_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
