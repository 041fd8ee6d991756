"""Destroys objects of libraries in `__del__`, which may run on any thread and in the middle of other work."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from dispatch.device.disposal import dispose
from dispatch.device.stream import relaxed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Held", "finalizer"]


def finalizer(destroy: Callable[[Any], None]) -> Callable[[Any], None]:
    """A `__del__` for an object that holds more than host memory in a library.

    The garbage collector may call it while the caller captures a stream. To free device memory or unload a kernel would
    end that capture in the default mode, so it runs in the relaxed mode. When the interpreter exits, nothing is
    destroyed, because the library may already be unloaded.
    """

    def now(self: Any) -> None:
        with relaxed():
            destroy(self)

    @wraps(destroy)
    def finalize(self: Any) -> None:
        if not sys.is_finalizing():
            dispose(now, self)

    return finalize


class Held:
    """Owns an object of a library: `c` is its ctypes handle, which `destroy` destroys."""

    __slots__ = ("__weakref__", "_destroy", "c")

    def __init__(self, c: Any, destroy: Any) -> None:
        self.c, self._destroy = c, destroy.unchecked

    @finalizer
    def __del__(self) -> None:
        if getattr(self, "c", None):
            self._destroy(self.c)
            self.c = None
