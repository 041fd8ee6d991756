"""Blocks of a GPU's memory that died, kept for the next of their size: handed out without a call of the driver.

A stream runs in order what it is given. So memory that was used on one stream alone may be used there again at once,
as the driver's own pool has it. cuda.py asks here first; what is not kept goes to releases.py. Nothing in here calls
the driver, touches a stream's handle or waits.
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
UNIT_BITS = 9  # blocks are of so many times 512 bytes, as the driver aligns
LARGEST = 8 * MIB  # bytes; larger blocks are not kept
MOST_BYTES = 64 * MIB  # of all blocks that are kept
MOST_BLOCKS = 64  # of one size on one stream
MOST_LISTS = 128  # sizes on streams


class FreeList:
    """The free blocks of one size on one stream of ours.

    Guarantees: `bases` has what died and was used on this stream alone, and no more than `capacity`; one more for each
    thread that gives one back at this very moment. Each step is one of a deque's, which finalizers and threads may come
    in between. Once it is closed, nothing stays in it: who appends looks whether it is open behind that.
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
        self.units = units  # by which its stream has it
        self.nbytes = max(units, 1) << UNIT_BITS
        self.bases: deque[int] = deque()
        self.capacity = 1
        self.is_open = True
        self.was_used = False  # since its turn to go came last
        self.stream = weakref.ref(stream)  # whose it is, so that a stream that nobody has goes at once
        self._c_handle = stream.c_handle  # an object of this stream's own, which tells it from others
        self._free, self._otherwise = free, otherwise

    def take_back(self, storage: Storage) -> None:
        """Keep the memory of a storage that dies, if that was used here alone; a storage's `free`."""
        bases = self.bases
        if (
            storage.writer.c_handle is self._c_handle
            and not storage.readers
            and not storage.lent
            and self.is_open
            and len(bases) < self.capacity
        ):
            bases.append(storage.base)
            if not self.is_open:  # it was closed since it was looked at above
                self.drain(storage.writer)
        else:
            self._otherwise(storage)

    def drain(self, stream: Stream) -> bool:
        """Free all blocks, behind what is enqueued on a stream; whether there were any."""
        found = False
        while self.bases:
            with suppress(IndexError):  # others may take of them as well
                self._free(self.bases.pop(), stream)
                found = True
        return found

    def close(self, stream: Stream) -> None:
        """Keep nothing from now on, and free all blocks, behind what is enqueued on a stream."""
        self.is_open = False
        self.drain(stream)

    def lose(self) -> None:
        """Forget all blocks: their memory is gone."""
        self.is_open = False
        self.bases.clear()


class BlockCache:
    """The free lists of one device's streams; those of a stream lie in its `free_lists`, by size.

    Guarantees: the capacities of all lists together are no more than MOST_BYTES, and there are no more lists than
    MOST_LISTS. A list may have as many blocks as its stream was in want of at once; where there is no room for another,
    the one goes whose blocks were asked for longest ago. One thread at a time makes or grows a list; others, and
    finalizers that come in between, do without.
    """

    def __init__(self, side: Stream, free: Callable[[int, Stream], None], otherwise: Callable[[Storage], None]) -> None:
        """`free(base, stream)` frees a block behind a stream, `otherwise(storage)` what cannot be kept.

        `side` is behind all streams that are closed (releases.py).
        """
        self._side, self._free, self._otherwise = side, free, otherwise
        self._lists: deque[FreeList] = deque()  # the next to go first
        self._kept = 0  # the bytes of their capacities
        self._is_lost = False
        self._changing = threading.Lock()
        anew(self, "_changing", threading.Lock)

    def wanted(self, stream: Stream, nbytes: int) -> FreeList | None:
        """The list that a new block of so many bytes goes back to, with room for it; None where it is not to be kept.

        It is asked for where the list has no block: so many are in use at once, and the list may grow by one.
        """
        if nbytes > LARGEST or not self._changing.acquire(blocking=False):
            return None
        try:
            units = (nbytes + (1 << UNIT_BITS) - 1) >> UNIT_BITS
            found: FreeList | None = stream.free_lists.get(units)
            if found is None:
                return self._new(stream, units)
            if found.capacity < MOST_BLOCKS and self._make_room(found, 0):
                found.capacity += 1
            return found
        finally:
            self._changing.release()

    def _new(self, stream: Stream, units: int) -> FreeList | None:
        made = FreeList(stream, units, self._free, self._otherwise)
        if not self._make_room(made, 1):
            return None
        self._lists.append(made)
        stream.free_lists[units] = made
        if self._is_lost or stream.external or stream.closed:  # by now; who made it so may not have seen the list
            made.is_open = False
            stream.free_lists.pop(units, None)
            return None
        return made

    def _make_room(self, asking: FreeList, more: int) -> bool:
        """Whether there is room for one block more, and so many lists, once those go that were not used for longest.

        Those that were used since their last turn stay this time.
        """
        for _ in range(len(self._lists)):
            if self._kept + asking.nbytes <= MOST_BYTES and len(self._lists) + more <= MOST_LISTS:
                break
            oldest = self._lists[0]
            if oldest.is_open and (oldest.was_used or oldest is asking):
                oldest.was_used = False
                self._lists.rotate(-1)
            else:
                self._end(oldest)
                self._lists.popleft()
                self._kept -= oldest.capacity * oldest.nbytes
        if self._kept + asking.nbytes > MOST_BYTES:
            self._count()  # as an exception may have come in between; the next one finds room then
            return False
        if len(self._lists) + more > MOST_LISTS:
            return False
        self._kept += asking.nbytes
        return True

    def _count(self) -> None:
        self._kept = sum([each.capacity * each.nbytes for each in self._lists])

    @staticmethod
    def _end(ended: FreeList) -> None:
        stream = ended.stream()
        if stream is not None:  # else it is about to be finalized, which sees to its lists
            ended.close(stream)
            if stream.free_lists.get(ended.units) is ended:
                stream.free_lists.pop(ended.units, None)

    def withdraw(self, stream: Stream) -> None:
        """Keep nothing of a stream any more, which is closed or known to others by now."""
        for units, each in stream.free_lists.copy().items():
            each.close(self._side if stream.closed else stream)
            stream.free_lists.pop(units, None)

    def flush(self) -> bool:
        """Free all blocks; whether there were any. What the lists may have grows from one on again."""
        found = False
        for each in self._lists.copy():
            stream = each.stream()
            found |= stream is not None and each.drain(stream)
        if self._changing.acquire(blocking=False):
            try:
                for each in self._lists:
                    each.capacity = 1
                self._count()
            finally:
                self._changing.release()
        return found

    def lose(self) -> None:
        """Forget all blocks, for good: the device is closed or lost, or its process was forked off."""
        self._is_lost = True
        for each in self._lists.copy():
            each.lose()
