"""Avoids deadlocks in driver calls that wait for the GPU (unload, free, load) while threads of a process are ranks.

To unload kernels or free memory, the driver blocks the calling thread until the GPU is idle. The garbage collector may
run on any thread. If threads of one process are ranks, that thread may wait for a GPU which waits for a collective of
the same thread (seen on two H200: rank 1's allocation collected an old plan of rank 0's GPU). So while a world of such
threads is open, finalizers pass their objects to a separate thread.

That thread does not destroy objects while a collective runs. The driver holds a lock while it waits; the thread of
another rank would wait for that lock, and so would the collective (seen on two H200: cuDNN's descriptors were
destroyed, one rank recorded an event and the other launched a kernel for the first time; all three waited). It destroys
objects when no collective is running on any GPU, and no collective begins meanwhile.

For the same reason kernels are not loaded while a collective runs. A plan is made after the earlier collectives of its
GPU are done, and the kernels of this library are loaded then, not at their first launch.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakSet

from cudabind import driver
from cudabind._fork import anew
from cudabind.errors import SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

__all__ = [
    "dispose",
    "enqueueing_collectives",
    "load_kernel",
    "members",
    "register_collectives",
    "start_disposal_thread",
    "stop_disposal_thread",
    "wait_for_collectives",
]

T = TypeVar("T")
Destroy = tuple["Callable[[Any], None]", Any]
PATIENCE = 10.0  # seconds that the end of a world waits until all objects are destroyed
LOADING = 2.0  # seconds that a plan waits for collectives, which may need later work of the same thread
DESTROYING = 2.0  # seconds that a collective waits for an object that is being destroyed
PAUSE = 5e-3  # seconds between two checks whether collectives are running
NOTHING: AbstractContextManager[None] = nullcontext()


class _DisposalThread:
    """The separate thread, while a world needs it; inside a `with` block on it, the thread starts no destruction.

    Guarantees: no object is destroyed between the beginning of such a block, in which a collective is enqueued, and the
    end of that collective on all GPUs. A block waits for an object that is being destroyed, up to DESTROYING seconds:
    the GPU may be busy with an endless kernel.
    """

    def __init__(self) -> None:
        self.users = 1
        self.queue: SimpleQueue[Destroy | None] = SimpleQueue()  # its put() is reentrant, as finalizers need
        self._changed = threading.Condition()
        self._blocks = self._entered = 0  # blocks that are open, and all so far
        self._is_destroying = False
        self.thread = threading.Thread(target=self._run, name="disposal", daemon=True)
        self.thread.start()

    def __enter__(self) -> None:
        with self._changed:
            if self._is_destroying:
                self._changed.wait_for(lambda: not self._is_destroying, DESTROYING)
            self._blocks += 1
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._blocks -= 1

    def _run(self) -> None:
        while (item := self.queue.get()) is not None:
            while not self._may_destroy():
                time.sleep(PAUSE)
            _Finalized(*item)
            del item  # else the last object would stay alive until the next arrives
            with self._changed:
                self._is_destroying = False
                self._changed.notify_all()

    def _may_destroy(self) -> bool:
        with self._changed:
            if self._blocks:
                return False
            entered = self._entered
        if not all(each.is_idle for each in _registered()):  # asks the driver, so no rank may wait for this thread
            return False
        with self._changed:
            self._is_destroying = entered == self._entered  # else a collective has begun meanwhile
            return self._is_destroying


class _Finalized:
    """Destroys an object in `__del__`, so that an error is reported like any finalizer's and the thread goes on."""

    def __init__(self, destroy: Callable[[Any], None], owner: Any) -> None:
        self._destroy, self._owner = destroy, owner

    def __del__(self) -> None:
        self._destroy(self._owner)


_disposal: _DisposalThread | None = None
_lock = threading.Lock()
anew(sys.modules[__name__], "_lock", threading.Lock)
anew(sys.modules[__name__], "_disposal", lambda: None)  # a child has no such thread


def start_disposal_thread() -> None:
    """From now on finalizers of all threads destroy on a separate thread; `stop_disposal_thread()` ends that."""
    global _disposal
    with _lock:
        if _disposal is None:
            _disposal = _DisposalThread()
        else:
            _disposal.users += 1


def stop_disposal_thread() -> None:
    """Undo one start. The last call waits, up to PATIENCE, until all objects on the thread are destroyed."""
    global _disposal
    with _lock:
        disposal = _disposal
        if disposal is None:  # in a forked child, whose parent started the thread
            return
        disposal.users -= 1
        if disposal.users:
            return
        _disposal = None
    disposal.queue.put(None)
    if threading.current_thread() is not disposal.thread:
        disposal.thread.join(PATIENCE)


def dispose(destroy: Callable[[Any], None], owner: Any) -> None:
    """Call `destroy(owner)`: here, or on the disposal thread, which keeps the owner alive until then."""
    disposal = _disposal
    if disposal is None or threading.current_thread() is disposal.thread:
        destroy(owner)
    else:
        disposal.queue.put((destroy, owner))


class Collectives(Protocol):
    """A communicator over a GPU, which knows the collectives that are running there."""

    @property
    def device(self) -> object:
        """The GPU."""

    @property
    def is_idle(self) -> bool:
        """Whether none is running; False also if a caller's graph has collectives: its launches are not visible."""

    def wait_for_work(self, seconds: float) -> bool:
        """Wait up to `seconds` for the running collectives; returns whether they are done."""


_collectives: WeakSet[Collectives] = WeakSet()


def register_collectives(communicator: Collectives) -> None:
    """Register a communicator: other calls then wait for its collectives."""
    _collectives.add(communicator)


def enqueueing_collectives() -> AbstractContextManager[None]:
    """A block in which to enqueue collectives and to record that they are running."""
    return _disposal or NOTHING


def wait_for_collectives(device: object) -> None:
    """Wait, up to LOADING, for the collectives of a GPU, if threads of this process are ranks; else do nothing."""
    if _disposal is not None:
        for communicator in _registered():
            if communicator.device is device:
                communicator.wait_for_work(LOADING)


def load_kernel(function: int) -> None:
    """Load a kernel now, not at its first launch, if threads of this process are ranks."""
    if _disposal is not None:
        with suppress(SymbolNotFound):  # a driver from before CUDA 12.4
            driver.cuFuncLoad.unchecked(ctypes.c_void_p(function))


def members(of: Iterable[T]) -> list[T]:
    """The members of a weak set, whose objects may disappear, and to which other threads may add, in the meantime."""
    while True:
        try:
            return list(of)
        except RuntimeError:  # noqa: PERF203  # it changed size while it was read: try again
            continue


def _registered() -> list[Collectives]:
    """The communicators; others may be made or collected meanwhile."""
    return members(_collectives)
