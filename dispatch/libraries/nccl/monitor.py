"""The thread that monitors all communicators of NCCL, for work that exceeds its deadline and for errors of NCCL.

It runs while there are open communicators. Otherwise an error would be noticed only by the next call, but a thread that
waits for a stream makes no call, and NCCL's kernels wait for other ranks for ever. It polls and is never woken: a
thread that woke it while enqueueing a call would pass the interpreter's lock to it, and wait to get it back.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from cudabind import driver
from cudabind._fork import anew
from dispatch.device.stream import NOT_READY, relaxed
from dispatch.errors import CollectiveError, CollectiveTimeout, DispatchError

if TYPE_CHECKING:
    import ctypes
    from collections import deque

    from dispatch.device.cuda import CudaDevice

__all__ = ["check_communicator", "is_idle", "wait_for_work", "watch"]

PAUSE = 10e-3  # seconds between checks of running work; a check holds the interpreter's lock for some 0.1 ms
IDLE = 0.1  # seconds between checks without running work, for errors of the network only
SHORT = 1e-3  # seconds between checks in `wait_for_work`
IN_PROGRESS = 7


class PendingLike(Protocol):
    """The part of a PendingWork (communicator.py) that this module uses."""

    @property
    def event(self) -> ctypes.c_void_p:
        """The event recorded after it."""

    @property
    def until(self) -> float:
        """Its deadline, a time of `time.monotonic`."""

    @property
    def what(self) -> str:
        """The name of the call."""


class WatchedCommunicator(Protocol):
    """The part of an NcclCommunicator that this module uses."""

    device: CudaDevice
    error: CollectiveError | None
    closed: bool
    in_graphs: bool
    deadline: float
    call_deadline: float
    pending_lock: threading.Lock

    @property
    def pending(self) -> deque[Any]:
        """Its calls that may not be done, each a PendingLike, the oldest first."""

    def async_status(self) -> int:
        """NCCL's status of it."""

    def raise_status(self, function: str, status: int) -> None:
        """Raise the error of a status."""

    def fail(self, error: CollectiveError) -> None:
        """Fail it, and end its calls."""


_lock = threading.Lock()
_watched: weakref.WeakSet[WatchedCommunicator] = weakref.WeakSet()
_thread: threading.Thread | None = None
anew(sys.modules[__name__], "_lock", threading.Lock)


def watch(communicator: WatchedCommunicator) -> None:
    """Monitor a communicator from now on, until it fails or is closed."""
    global _thread  # one for the process
    with _lock:
        _watched.add(communicator)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="nccl monitor", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    looked = 0.0  # the time of the last check of communicators without running work
    with relaxed():  # its queries must not invalidate another thread's capture
        while True:
            with _lock:
                open_ones = [each for each in _watched if each.error is None and not each.closed]
                if not open_ones:
                    _thread = None
                    return
            now = time.monotonic()
            is_time = now > looked + IDLE
            looked = now if is_time else looked
            for each in open_ones:
                if is_time or each.pending or each.call_deadline < math.inf:
                    check_communicator(each)
            del open_ones, each
            time.sleep(PAUSE)


def check_communicator(communicator: WatchedCommunicator) -> bool:
    """Recycle finished events, and fail a communicator that is late or broken; returns whether work is running."""
    try:
        with communicator.device.context:
            _recycle_finished(communicator)
        if time.monotonic() > communicator.call_deadline:
            late = f"a call has not come back from NCCL within {communicator.deadline:g} s"
            communicator.fail(CollectiveTimeout(f"{communicator!r}: {late}"))
            return False
        if communicator.call_deadline < math.inf:
            return True  # while a call is inside NCCL, its status is not queried from another thread
        oldest = _oldest(communicator)
        if oldest is not None and time.monotonic() > oldest.until:
            call = oldest.what
            late = f"{call} was not done on all ranks within {communicator.deadline:g} s"
            communicator.fail(CollectiveTimeout(f"{communicator!r}: {late}"))
            return False
        status = communicator.async_status()
        if status not in (0, IN_PROGRESS):
            communicator.raise_status("ncclCommGetAsyncError", status)
    except CollectiveError:
        return False  # the next call raises it, or the thread that waits
    except Exception as error:  # noqa: BLE001  # a lost device or any other error: waiting threads must get it
        if not communicator.closed:
            communicator.fail(CollectiveError(f"{communicator!r}: {error}"))
        return False
    return bool(communicator.pending)


def wait_for_work(communicator: WatchedCommunicator, seconds: float) -> bool:
    """Wait up to `seconds` for the work of a communicator; returns whether it is done."""
    until = time.monotonic() + seconds
    with communicator.device.context, relaxed():
        _recycle_finished(communicator)
        while communicator.pending and time.monotonic() < until:
            time.sleep(SHORT)
            _recycle_finished(communicator)
    return not communicator.pending


def is_idle(communicator: WatchedCommunicator) -> bool:
    """Whether no call of it is running; False also if a caller's graphs contain its calls."""
    if communicator.closed or communicator.error is not None:  # an abort ends running calls
        return True
    try:
        return not communicator.in_graphs and wait_for_work(communicator, 0.0)
    except DispatchError:  # its GPU is lost or closed, and with it every call
        return True


def _oldest(communicator: WatchedCommunicator) -> PendingLike | None:
    """The oldest call, or None; other threads may remove and add calls."""
    try:
        oldest: PendingLike = communicator.pending[0]
    except IndexError:
        return None
    return oldest


def _recycle_finished(communicator: WatchedCommunicator) -> None:
    pending, device = communicator.pending, communicator.device
    while True:
        with communicator.pending_lock:
            if not pending:
                return
            status = driver.cuEventQuery.unchecked(pending[0].event)
            if status == 0:
                device.recycle(pending.popleft().event)
        if status == NOT_READY:
            return
        if status:
            device.fail(status, "cuEventQuery")
