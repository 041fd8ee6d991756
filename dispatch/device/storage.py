"""Storage: the owner of one piece of memory, which tracks the streams that use it, to order uses and its release.

Tensors are views of it. Nothing here allocates or copies; it only makes streams wait for one another.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from cudabind._fork import anew
from dispatch.device.stream import order

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from dispatch.device.device import Device
    from dispatch.device.stream import Stream

__all__ = ["NOBODY", "Storage"]

NOBODY: AbstractSet[Stream] = frozenset()


class Storage:
    """Owner of one piece of memory, and of the order in which streams use it.

    Guarantees: `owner` is the only stream that has used the memory since the last write, or None if several have.
    `writer` is the stream that wrote last; `readers` are the streams that already wait for that write. A use on another
    stream enqueues the event waits that it needs, and the memory is freed only after all its users.
    """

    __slots__ = ("__weakref__", "base", "device", "free", "keep", "lent", "nbytes", "owner", "readers", "writer")
    # Held while uses are recorded and ordered, so that none of these streams is destroyed meanwhile. Reentrant, because
    # a user's finalizer may run inside it and use tensors.
    ordering = threading.RLock()

    def __init__(
        self, device: Device, base: int, nbytes: int, stream: Stream, free: Callable[[Storage], None], keep: Any = None
    ) -> None:
        self.device, self.base, self.nbytes, self.free = device, base, nbytes, free
        self.keep = keep  # the object that owns the memory, if that is not the device's pool
        self.owner: Stream | None = stream
        self.writer = stream
        self.readers: AbstractSet[Stream] = NOBODY
        self.lent: dict[Stream | None, int] | None = None  # consumers' streams; None: unknown

    def use(self, stream: Stream, *, write: bool) -> None:
        """Order a use on `stream` after the conflicting uses on other streams."""
        if self.owner is stream or (not write and self.is_behind(stream)):
            return
        with self.ordering:
            if write:
                for other in self.users():
                    stream.wait_for_uses(other)
                self.owner = self.writer = stream
                self.readers = NOBODY
            elif stream is not self.writer and stream not in self.readers:
                stream.wait_for_uses(self.writer)
                self.readers = {*self.readers, stream}
                self.owner = None
            order.sync_epoch += 1

    def take_over(self, stream: Stream, known: Stream) -> None:
        """Order a write on `stream` after the other uses; `stream` already waits for all work of `known`."""
        with self.ordering:
            for other in self.users():
                if other is not known:
                    stream.wait_for_uses(other)
            self.owner = self.writer = stream
            self.readers = NOBODY
            order.sync_epoch += 1

    def is_behind(self, stream: Stream) -> bool:
        """Whether work enqueued on `stream` is ordered after the last write already."""
        return stream is self.writer or stream in self.readers

    def users(self) -> set[Stream]:
        """The streams on which the memory may still be in use."""
        return {self.writer, *self.readers}

    def lend(self, stream: Stream | None) -> None:
        """Record that another library may use this memory on its own stream (None: unknown) until it drops it."""
        with self.ordering:
            lent, identity = dict(self.lent or {}), 0 if stream is None else stream.identity
            if lent.get(stream, identity) != identity:
                lent[None] = 0  # the handle referred to another stream then, which cannot be identified any more
            self.lent = {**lent, stream: identity}

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        try:
            free = self.free
        except AttributeError:  # Ctrl-C interrupted __init__ before its first line
            return
        free(self)


anew(Storage, "ordering", threading.RLock)
