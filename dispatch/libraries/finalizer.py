"""How what libraries have made is destroyed once nobody has it: on any thread, and amid whatever that thread does."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any

from dispatch.device.disposal import dispose
from dispatch.device.stream import relaxed

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["finalizer"]


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
