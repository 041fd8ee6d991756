"""Storage: the owner of one piece of memory, which knows the streams that use it, and so behind what it is freed.

Tensors are views of it. Nothing here allocates or copies: it only has streams wait for one another.
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

    Guarantees: `owner` is the one stream that has used the memory since its last writer, or None when several have;
    then `writer` is the last that wrote it and `readers` those that already wait for that write. A use on another
    stream enqueues the event waits it needs, and the memory is freed only behind all its users.
    """

    __slots__ = ("__weakref__", "base", "device", "free", "keep", "lent", "nbytes", "owner", "readers", "writer")
    # Held while uses are noted, and ordered behind streams that must not be destroyed meanwhile. What is collected in
    # between may be a user's, and use tensors as it goes.
    ordering = threading.RLock()

    def __init__(
        self, device: Device, base: int, nbytes: int, stream: Stream, free: Callable[[Storage], None], keep: Any = None
    ) -> None:
        self.device, self.base, self.nbytes, self.free = device, base, nbytes, free
        self.keep = keep  # what the memory lives in, where that is not the device's pool
        self.owner: Stream | None = stream
        self.writer = stream
        self.readers: AbstractSet[Stream] = NOBODY
        self.lent: dict[Stream | None, int] | None = None  # to consumers on these streams; None: one not named

    def use(self, stream: Stream, *, write: bool) -> None:
        """Order a use on `stream` behind the uses on other streams it conflicts with."""
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
        """Order a write on `stream`, which is behind all of `known` already, behind the other uses alone."""
        with self.ordering:
            for other in self.users():
                if other is not known:
                    stream.wait_for_uses(other)
            self.owner = self.writer = stream
            self.readers = NOBODY
            order.sync_epoch += 1

    def is_behind(self, stream: Stream) -> bool:
        """Whether what is enqueued on `stream` is behind the last write already."""
        return stream is self.writer or stream in self.readers

    def users(self) -> set[Stream]:
        """The streams that the memory may still be in use on."""
        return {self.writer, *self.readers}

    def lend(self, stream: Stream | None) -> None:
        """Note that a consumer may use this memory on a stream of its own, until it gives it back."""
        with self.ordering:
            lent, identity = dict(self.lent or {}), 0 if stream is None else stream.identity
            if lent.get(stream, identity) != identity:
                lent[None] = 0  # the handle meant another stream then, which has work and no name any more
            self.lent = {**lent, stream: identity}

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        try:
            free = self.free
        except AttributeError:  # Ctrl-C has come before the first line of __init__
            return
        free(self)


anew(Storage, "ordering", threading.RLock)
