"""What may wait within the driver while threads of one process are ranks: unloading and loading.

To unload kernels or free memory, the driver waits until the GPU is idle, and so does the thread that asked. The garbage
collector may run on any thread. Where threads of one process are ranks, that thread may wait for a GPU which waits for
a collective of the same thread (seen on two H200: rank 1's allocation collected an old plan of rank 0's GPU). So while
a world of such threads is open, finalizers hand their objects over to a separate thread.

Nor are kernels loaded beside a collective then: its kernel waits for another rank, whose thread may wait for a lock of
the driver that the loading holds. A plan is made once the collectives of its GPU that were enqueued before are done.
"""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cudabind._fork import anew

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.device import Device

__all__ = ["dispose", "register_collectives", "start_disposal_thread", "stop_disposal_thread", "wait_for_collectives"]

Destroy = tuple["Callable[[Any], None]", Any]
PATIENCE = 10.0  # seconds that the end of a world waits for objects still to be destroyed
LOADING = 2.0  # seconds that a plan waits for collectives, which may in turn need what its thread does next


class _DisposalThread:
    """The separate thread, while a world needs it."""

    def __init__(self) -> None:
        self.users = 1
        self.queue: SimpleQueue[Destroy | None] = SimpleQueue()  # its put() is reentrant, as finalizers need
        self.thread = threading.Thread(target=self._run, name="disposal", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (given := self.queue.get()) is not None:
            _Finalized(*given)
            del given  # else the last object would stay alive until the next arrives


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


_collectives: WeakKeyDictionary[Any, Callable[[Any, float], Any]] = WeakKeyDictionary()


def register_collectives(communicator: Any, ends: Callable[[Any, float], Any]) -> None:
    """Have `wait_for_collectives` call `ends(communicator, seconds)`, which waits for what is under way on its GPU."""
    _collectives[communicator] = ends


def wait_for_collectives(device: Device) -> None:
    """Wait, up to LOADING, for the collectives of a GPU, if threads of this process are ranks; else do nothing."""
    if _disposal is not None:
        for known in _collectives.keyrefs():
            communicator = known()
            if communicator is not None and communicator.device is device:
                _collectives[communicator](communicator, LOADING)
