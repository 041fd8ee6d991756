"""Where finalizers destroy what a driver or a library has made: on the thread they come by on, or on one of its own.

The driver unloads kernels and gives memory back once a GPU is idle, and whoever asked for it waits. The garbage
collector asks on any thread: where threads of one process are ranks, a GPU may be waiting for a collective of the very
thread that waits for it (seen on two H200: rank 1's allocation collected an old plan of rank 0's GPU). While a world of
such threads is open, finalizers hand over what they have to a thread that nobody waits for.
"""

from __future__ import annotations

import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from cudabind._fork import anew

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["begin_apart", "dispose", "end_apart"]

Destroy = tuple["Callable[[Any], None]", Any]
PATIENCE = 10.0  # seconds that the end of a world waits for what is still to be destroyed


class _Apart:
    """The thread, while anybody needs it."""

    def __init__(self) -> None:
        self.users = 1
        self.queue: SimpleQueue[Destroy | None] = SimpleQueue()  # its put() may interrupt itself, as finalizers do
        self.thread = threading.Thread(target=self._run, name="disposal", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (given := self.queue.get()) is not None:
            _Last(*given)
            del given  # else the last one is there as long as nothing follows


class _Last:
    """What is destroyed as this goes: an error is told as that of any finalizer, and raised nowhere."""

    def __init__(self, destroy: Callable[[Any], None], owner: Any) -> None:
        self._destroy, self._owner = destroy, owner

    def __del__(self) -> None:
        self._destroy(self._owner)


_apart: _Apart | None = None
_lock = threading.Lock()
anew(sys.modules[__name__], "_lock", threading.Lock)
anew(sys.modules[__name__], "_apart", lambda: None)  # a child has no such thread


def begin_apart() -> None:
    """From now on finalizers of all threads destroy on a thread of their own; `end_apart()` ends it."""
    global _apart
    with _lock:
        if _apart is None:
            _apart = _Apart()
        else:
            _apart.users += 1


def end_apart() -> None:
    """The end of one `begin_apart`. Behind the last, what was handed over is destroyed, but for what takes too long."""
    global _apart
    with _lock:
        ended = _apart
        if ended is None:  # a child's, whose parent began
            return
        ended.users -= 1
        if ended.users:
            return
        _apart = None
    ended.queue.put(None)
    if threading.current_thread() is not ended.thread:
        ended.thread.join(PATIENCE)


def dispose(destroy: Callable[[Any], None], owner: Any) -> None:
    """Have `destroy(owner)` done: here, or on the thread of `begin_apart`, which has the owner until then."""
    apart = _apart
    if apart is None or threading.current_thread() is apart.thread:
        destroy(owner)
    else:
        apart.queue.put((destroy, owner))
