"""What may wait within the driver while threads of one process are ranks: unloading and loading.

To unload kernels or free memory, the driver waits until the GPU is idle, and so does the thread that asked. The garbage
collector may run on any thread. Where threads of one process are ranks, that thread may wait for a GPU which waits for
a collective of the same thread (seen on two H200: rank 1's allocation collected an old plan of rank 0's GPU). So while
a world of such threads is open, finalizers hand their objects over to a separate thread.

Nor does that thread destroy anything beside a collective: the driver holds a lock while it waits, for which the thread
of another rank would wait, and with it the collective (seen on two H200: cuDNN's descriptors were destroyed, one rank
recorded an event and the other launched a kernel for the first time; all three waited). It destroys when no collective
is under way on any GPU, and none begins meanwhile.

And kernels are not loaded beside a collective, for the same reason. A plan is made once the collectives of its GPU that
were enqueued before are done, and the kernels of this library are loaded then, not at their first launch.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from contextlib import nullcontext, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from cudabind import driver
from cudabind._fork import anew
from cudabind.errors import SymbolNotFound
from dispatch.device.weak_members import members

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

__all__ = [
    "dispose",
    "enqueueing_collectives",
    "load_kernel",
    "register_collectives",
    "start_disposal_thread",
    "stop_disposal_thread",
    "wait_for_collectives",
]

Destroy = tuple["Callable[[Any], None]", Any]
PATIENCE = 10.0  # seconds that the end of a world waits for objects still to be destroyed
LOADING = 2.0  # seconds that a plan waits for collectives, which may in turn need what its thread does next
DESTROYING = 2.0  # seconds that a collective waits for an object that is being destroyed
PAUSE = 5e-3  # seconds between two looks at whether collectives are under way
NOTHING: AbstractContextManager[None] = nullcontext()


class _DisposalThread:
    """The separate thread, while a world needs it; as a context manager, a block in which it begins to destroy nothing.

    Guarantees: no object is destroyed between the beginning of such a block, in which a collective is enqueued, and the
    end of that collective on all GPUs. A block waits for an object that is being destroyed, but not for ever: the GPU
    may be busy with an endless kernel.
    """

    def __init__(self) -> None:
        self.users = 1
        self.queue: SimpleQueue[Destroy | None] = SimpleQueue()  # its put() is reentrant, as finalizers need
        self._changed = threading.Condition()
        self._blocks = 0
        self._is_destroying = False
        self.thread = threading.Thread(target=self._run, name="disposal", daemon=True)
        self.thread.start()

    def __enter__(self) -> None:
        with self._changed:
            if self._is_destroying:
                self._changed.wait_for(lambda: not self._is_destroying, DESTROYING)
            self._blocks += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._blocks -= 1

    def _run(self) -> None:
        while (given := self.queue.get()) is not None:
            while not self._may_destroy():
                time.sleep(PAUSE)
            _Finalized(*given)
            del given  # else the last object would stay alive until the next arrives
            with self._changed:
                self._is_destroying = False
                self._changed.notify_all()

    def _may_destroy(self) -> bool:
        with self._changed:
            self._is_destroying = not self._blocks and all(each.is_idle for each in _registered())
            return self._is_destroying


class _Finalized:
    """Destroys an object in `__del__`, so that an error is reported as that of any finalizer and ends no thread."""

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
    """End one start. The last one waits, up to PATIENCE, until all that was handed over is destroyed."""
    global _disposal
    with _lock:
        ended = _disposal
        if ended is None:  # in a forked child, whose parent began
            return
        ended.users -= 1
        if ended.users:
            return
        _disposal = None
    ended.queue.put(None)
    if threading.current_thread() is not ended.thread:
        ended.thread.join(PATIENCE)


def dispose(destroy: Callable[[Any], None], owner: Any) -> None:
    """Call `destroy(owner)`: here, or on the disposal thread, which keeps the owner alive until then."""
    disposal = _disposal
    if disposal is None or threading.current_thread() is disposal.thread:
        destroy(owner)
    else:
        disposal.queue.put((destroy, owner))


class Collectives(Protocol):
    """A communicator over a GPU, which knows the collectives that are under way there."""

    @property
    def device(self) -> object:
        """The GPU."""

    @property
    def is_idle(self) -> bool:
        """Whether none is under way; False also where a caller's graphs have some: it learns nothing of launches."""

    def wait_for_work(self, seconds: float) -> bool:
        """Wait up to so long for those under way; returns whether they are done."""


_collectives: WeakSet[Collectives] = WeakSet()


def register_collectives(communicator: Collectives) -> None:
    """Have the communicator's collectives waited for."""
    _collectives.add(communicator)


def enqueueing_collectives() -> AbstractContextManager[None]:
    """A block in which to enqueue collectives and to record that they are under way."""
    return _disposal or NOTHING


def wait_for_collectives(device: object) -> None:
    """Wait, up to LOADING, for the collectives of a GPU, if threads of this process are ranks; else do nothing."""
    if _disposal is not None:
        for communicator in _registered():
            if communicator.device is device:
                communicator.wait_for_work(LOADING)


def load_kernel(function: int) -> None:
    """Have the driver load a kernel now, and not at its first launch, if threads of this process are ranks."""
    if _disposal is not None:
        with suppress(SymbolNotFound):  # a driver from before CUDA 12.4
            driver.cuFuncLoad.unchecked(ctypes.c_void_p(function))


def _registered() -> list[Collectives]:
    """The communicators; others may be made or collected meanwhile."""
    return members(_collectives)
