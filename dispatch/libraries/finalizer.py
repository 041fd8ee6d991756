"""How what libraries have made is destroyed once nobody has it: on any thread, and amid whatever that thread does."""

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
    """A `__del__` for what a library keeps more for than memory of the host.

    The garbage collector may call it amid a caller's capture, which the library would end as it gives memory of the GPU
    back or unloads a kernel: hence `relaxed()`. As the interpreter ends nothing is destroyed: the library may be gone.
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
    """What a library has made and takes back: `c`, its handle of ctypes, and the function that destroys it."""

    __slots__ = ("__weakref__", "_destroy", "c")

    def __init__(self, c: Any, destroy: Any) -> None:
        self.c, self._destroy = c, destroy.unchecked

    @finalizer
    def __del__(self) -> None:
        if getattr(self, "c", None):
            self._destroy(self.c)
            self.c = None
