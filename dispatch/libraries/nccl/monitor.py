"""One thread that looks after all communicators of NCCL: what is not done by its deadline, and errors that NCCL tells.

It is there while there are communicators that are open. The other way to learn of an error is a call; but who waits for
a stream makes none, and NCCL's kernels wait for other ranks for ever. Nobody wakes it: who enqueues a call would hand
it the interpreter's lock at that moment, and wait for it.
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
from dispatch.errors import CollectiveError, CollectiveTimeout

if TYPE_CHECKING:
    import ctypes
    from collections import deque

    from dispatch.device.cuda import CudaDevice

__all__ = ["check_communicator", "wait_for_work", "watch"]

PAUSE = 10e-3  # seconds between looks at what is under way; who looks has the interpreter's lock for some 0.1 ms
IDLE = 0.1  # between looks at the others, for errors that come from the network alone
SHORT = 1e-3  # where a thread waits for the answer
IN_PROGRESS = 7


class PendingLike(Protocol):
    """A call whose work the GPU may not have done yet."""

    @property
    def event(self) -> ctypes.c_void_p:
        """What is recorded behind it."""

    @property
    def until(self) -> float:
        """When it is to be done, as `time.monotonic` counts."""

    @property
    def what(self) -> str:
        """The call."""


class WatchedCommunicator(Protocol):
    """What is looked after: a communicator of NCCL."""

    device: CudaDevice
    error: CollectiveError | None
    closed: bool
    deadline: float
    call_deadline: float
    pending_lock: threading.Lock

    @property
    def pending(self) -> deque[Any]:
        """Its calls that may not be done, the oldest first; each is Noted."""

    def async_status(self) -> int:
        """What NCCL says of it."""

    def raise_status(self, function: str, status: int) -> None:
        """Raise what a status means."""

    def fail(self, error: CollectiveError) -> None:
        """End what is under way."""


_lock = threading.Lock()
_watched: weakref.WeakSet[WatchedCommunicator] = weakref.WeakSet()
_thread: threading.Thread | None = None
anew(sys.modules[__name__], "_lock", threading.Lock)


def watch(communicator: WatchedCommunicator) -> None:
    """Look after a communicator from now on, until it fails or is closed."""
    global _thread  # one for the process
    with _lock:
        _watched.add(communicator)
        if _thread is None or not _thread.is_alive():
            _thread = threading.Thread(target=_run, name="nccl monitor", daemon=True)
            _thread.start()


def _run() -> None:
    global _thread
    looked = 0.0  # at those that have no work under way
    with relaxed():  # what it asks ends nobody's capture
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
    """Let go of what is done, and fail what is late or broken; whether something is under way."""
    try:
        with communicator.device.context:
            _recycle_finished(communicator)
        if time.monotonic() > communicator.call_deadline:
            late = f"a call has not come back from NCCL within {communicator.deadline:g} s"
            communicator.fail(CollectiveTimeout(f"{communicator!r}: {late}"))
            return False
        if communicator.call_deadline < math.inf:
            return True  # NCCL is asked about it by nobody else meanwhile
        oldest = _oldest(communicator)
        if oldest is not None and time.monotonic() > oldest.until:
            what = oldest.what
            late = f"{what} was not done on all ranks within {communicator.deadline:g} s"
            communicator.fail(CollectiveTimeout(f"{communicator!r}: {late}"))
            return False
        status = communicator.async_status()
        if status not in (0, IN_PROGRESS):
            communicator.raise_status("ncclCommGetAsyncError", status)
    except CollectiveError:
        return False  # it is told to who waits or calls
    except Exception as error:  # noqa: BLE001  # the device is lost, or whatever else: who waits must be told
        if not communicator.closed:
            communicator.fail(CollectiveError(f"{communicator!r}: {error}"))
        return False
    return bool(communicator.pending)


def wait_for_work(communicator: WatchedCommunicator, seconds: float) -> bool:
    """Wait for the work of a communicator that is closed; whether it was done within some seconds."""
    until = time.monotonic() + seconds
    with communicator.device.context, relaxed():
        _recycle_finished(communicator)
        while communicator.pending and time.monotonic() < until:
            time.sleep(SHORT)
            _recycle_finished(communicator)
    return not communicator.pending


def _oldest(communicator: WatchedCommunicator) -> PendingLike | None:
    """The call that is to be done first; other threads take and add some."""
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
