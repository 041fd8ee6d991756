"""A cache of freed blocks of GPU memory, by stream and size: they are reused without a driver call.

A stream runs its work in order. So memory that was used on one stream only may be used there again at once, as in the
driver's own pool. cuda.py looks here first; blocks that are not cached go to releases.py. Nothing in here calls the
driver, touches a stream's handle or waits.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from cudabind._fork import anew

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.storage import Storage
    from dispatch.device.stream import Stream

__all__ = ["UNIT_BITS", "BlockCache", "FreeList"]

MIB = 1 << 20
UNIT_BITS = 9  # sizes are multiples of 512 bytes, the driver's alignment
LARGEST = 8 * MIB  # bytes; larger blocks are not cached
MAX_BYTES = 64 * MIB  # of all blocks that may be cached
MAX_BLOCKS = 64  # of one size on one stream
MAX_LISTS = 128  # pairs of a size and a stream


class FreeList:
    """The free blocks of one size on one of our streams.

    Guarantees: `bases` holds only blocks that were used on this stream alone, and no more than `capacity`, plus one for
    each thread that is returning one at the moment. Every step is one atomic operation of a deque, so finalizers and
    other threads may run in between. A closed list stays empty: a thread that appends checks afterwards whether the
    list is still open.
    """

    __slots__ = (
        "_c_handle",
        "_free",
        "_otherwise",
        "bases",
        "capacity",
        "is_open",
        "nbytes",
        "stream",
        "units",
        "was_used",
    )

    def __init__(
        self,
        stream: Stream,
        units: int,
        free: Callable[[int, Stream], None],
        otherwise: Callable[[Storage], None],
    ) -> None:
        self.units = units  # its key in the stream's `free_lists`
        self.nbytes = max(units, 1) << UNIT_BITS
        self.bases: deque[int] = deque()
        self.capacity = 1
        self.is_open = True
        self.was_used = False  # since it was last considered for eviction
        self.stream = weakref.ref(stream)  # weak, so that an unused stream is collected at once
        self._c_handle = stream.c_handle  # this very object identifies the stream
        self._free, self._otherwise = free, otherwise

    def take_back(self, storage: Storage) -> None:
        """The `free` of a storage: keep its memory if only this stream used it, else release it."""
        bases = self.bases
        if (
            storage.writer.c_handle is self._c_handle
            and not storage.readers
            and not storage.lent
            and self.is_open
            and len(bases) < self.capacity
        ):
            bases.append(storage.base)
            if not self.is_open:  # it was closed after the check above
                self.drain(storage.writer)
        else:
            self._otherwise(storage)

    def drain(self, stream: Stream) -> bool:
        """Free all blocks, ordered after the work that is enqueued on a stream; returns whether there were any."""
        has_freed = False
        while self.bases:
            with suppress(IndexError):  # other threads may take some as well
                self._free(self.bases.pop(), stream)
                has_freed = True
        return has_freed

    def close(self, stream: Stream) -> None:
        """Accept no more blocks, and free all blocks, ordered after the work that is enqueued on a stream."""
        self.is_open = False
        self.drain(stream)

    def lose(self) -> None:
        """Drop all blocks without freeing them: their memory no longer exists."""
        self.is_open = False
        self.bases.clear()


class BlockCache:
    """The free lists of one device's streams; `Stream.free_lists` has those of a stream, by size.

    Guarantees: the capacities of all lists together are at most MAX_BYTES, and there are at most MAX_LISTS lists. The
    capacity of a list grows to the number of blocks that its stream had in use at once. If there is no room, the least
    recently used list is evicted (by second chance). One thread at a time makes or grows a list; other threads, and
    finalizers that run meanwhile, do not wait: their blocks are not cached.
    """

    def __init__(self, side: Stream, free: Callable[[int, Stream], None], otherwise: Callable[[Storage], None]) -> None:
        """`free(base, stream)` frees a block after a stream's work, `otherwise(storage)` memory that is not cached.

        `side` is the stream that waits for all closed ones (releases.py).
        """
        self._side, self._free, self._otherwise = side, free, otherwise
        self._lists: deque[FreeList] = deque()  # the first one is evicted next
        self._kept = 0  # the bytes of all capacities
        self._is_lost = False
        self._changing = threading.Lock()
        anew(self, "_changing", threading.Lock)

    def wanted(self, stream: Stream, nbytes: int) -> FreeList | None:
        """The list for a new block of `nbytes`, with room for it; None if the block should not be cached.

        It is called when the list has no free block: more are in use at once than it holds, so its capacity grows by 1.
        """
        if nbytes > LARGEST or not self._changing.acquire(blocking=False):
            return None
        try:
            units = (nbytes + (1 << UNIT_BITS) - 1) >> UNIT_BITS
            free_list: FreeList | None = stream.free_lists.get(units)
            if free_list is None:
                return self._new(stream, units)
            if free_list.capacity < MAX_BLOCKS and self._make_room(free_list, 0):
                free_list.capacity += 1
            return free_list
        finally:
            self._changing.release()

    def _new(self, stream: Stream, units: int) -> FreeList | None:
        free_list = FreeList(stream, units, self._free, self._otherwise)
        if not self._make_room(free_list, 1):
            return None
        self._lists.append(free_list)
        stream.free_lists[units] = free_list
        if self._is_lost or stream.external or stream.closed:  # the thread that set it may have missed this list
            free_list.is_open = False
            stream.free_lists.pop(units, None)
            return None
        return free_list

    def _make_room(self, free_list: FreeList, more: int) -> bool:
        """Whether there is room for one block and `more` lists, after evicting the least recently used lists.

        A list that was used since it was last considered is skipped once.
        """
        for _ in range(len(self._lists)):
            if self._kept + free_list.nbytes <= MAX_BYTES and len(self._lists) + more <= MAX_LISTS:
                break
            oldest = self._lists[0]
            if oldest.is_open and (oldest.was_used or oldest is free_list):
                oldest.was_used = False
                self._lists.rotate(-1)
            else:
                self._end(oldest)
                self._lists.popleft()
                self._kept -= oldest.capacity * oldest.nbytes
        if self._kept + free_list.nbytes > MAX_BYTES:
            self._count()  # an exception may have left it wrong; the next call finds room then
            return False
        if len(self._lists) + more > MAX_LISTS:
            return False
        self._kept += free_list.nbytes
        return True

    def _count(self) -> None:
        self._kept = sum([each.capacity * each.nbytes for each in self._lists])

    @staticmethod
    def _end(free_list: FreeList) -> None:
        stream = free_list.stream()
        if stream is not None:  # else the stream's finalizer frees its lists
            free_list.close(stream)
            if stream.free_lists.get(free_list.units) is free_list:
                stream.free_lists.pop(free_list.units, None)

    def withdraw(self, stream: Stream) -> None:
        """Drop all lists of a stream that was closed or has become known to other libraries."""
        for units, each in stream.free_lists.copy().items():
            each.close(self._side if stream.closed else stream)
            stream.free_lists.pop(units, None)

    def flush(self) -> bool:
        """Free all blocks and reset all capacities to 1; returns whether there were any blocks."""
        has_freed = False
        for each in self._lists.copy():
            stream = each.stream()
            has_freed |= stream is not None and each.drain(stream)
        if self._changing.acquire(blocking=False):
            try:
                for each in self._lists:
                    each.capacity = 1
                self._count()
            finally:
                self._changing.release()
        return has_freed

    def lose(self) -> None:
        """Drop all blocks permanently: the device was closed or lost, or this is a forked child."""
        self._is_lost = True
        for each in self._lists.copy():
            each.lose()
