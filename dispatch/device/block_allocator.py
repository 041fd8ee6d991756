"""BlockAllocator: blocks of memory cut from a few large chunks, best fit first.

`shared_device.py` supplies chunks that another process can map, and hands the blocks out as storages; `pinned.py`
supplies page-locked ones. The allocator handles numbers only and never touches the memory.
"""

from __future__ import annotations

import threading
from _thread import get_ident
from bisect import bisect_left, insort
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from dispatch.errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Block", "BlockAllocator"]

ALIGNMENT = 512  # the same as the driver's own allocator
MIB = 1 << 20
GROWTH = 64 * MIB  # bytes of a chunk, unless a block needs more


class Block(NamedTuple):
    """A piece of a chunk, in bytes."""

    chunk: int
    offset: int
    nbytes: int


class BlockAllocator:
    """The blocks of a growing number of chunks.

    Guarantees: blocks in use never overlap. A block given back is merged with its free neighbours. Any thread may
    take and give back blocks; `give` may also run in a destructor that interrupts `take` on the same thread. The blocks
    in use and the sizes of the chunks are authoritative: if an exception (Ctrl-C on the main thread) leaves the
    lists of free blocks half changed, they are rebuilt from these.
    """

    def __init__(self, grow: Callable[[int], tuple[int, int]]) -> None:
        """`grow(nbytes)` makes a chunk of at least `nbytes` and returns its number and its size in bytes."""
        self._grow = grow
        self._lock = threading.Lock()
        self._holder = 0  # the thread that holds the lock
        self._torn = False  # whether the next three are being changed, or an exception interrupted a change
        self._by_size: list[tuple[int, int, int]] = []  # (nbytes, chunk, offset) of free blocks, sorted
        self._starts: dict[tuple[int, int], int] = {}  # (chunk, offset) -> nbytes of a free block
        self._ends: dict[tuple[int, int], int] = {}  # (chunk, end) -> its offset
        self._sizes: dict[int, int] = {}
        self._out: dict[tuple[int, int], int] = {}  # (chunk, offset) -> nbytes of a block in use
        self._returned: deque[Block] = deque()  # given back; the next call that takes the lock frees them
        self.used = 0

    def take(self, nbytes: int, growth: int = GROWTH) -> Block:
        """A block of at least `nbytes`; a new chunk has at least `growth` bytes. Raises what `grow` raises."""
        nbytes = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        self._refuse_nested()
        with self._lock:
            self._holder = get_ident()
            self._settle()
            place = bisect_left(self._by_size, (nbytes, -1, -1))
            if place == len(self._by_size):
                chunk, size = self._more(max(nbytes, growth))
                self._torn = True
                self._sizes[chunk] = size
                self._add(chunk, 0, size)
                place = bisect_left(self._by_size, (nbytes, -1, -1))
            self._torn = True
            size, chunk, offset = self._by_size[place]
            self._remove(chunk, offset, size)
            if size > nbytes:
                self._add(chunk, offset + nbytes, size - nbytes)
            block = Block(chunk, offset, nbytes)
            self._out[chunk, offset] = nbytes
            self.used += nbytes
            self._torn = False
            self._holder = 0
            return block

    def _more(self, nbytes: int) -> tuple[int, int]:
        try:
            return self._grow(nbytes)
        except BaseException:
            self._holder = 0  # else this thread's next call would count as nested
            raise

    def give(self, block: Block) -> None:
        """Give a block back; takes no lock, because a destructor may run anywhere."""
        self._returned.append(block)

    def bytes_in_use(self) -> int:
        """The bytes of the blocks in use."""
        self._refuse_nested()
        with self._lock:
            self._holder = get_ident()
            self._settle()
            self._holder = 0
            return self.used

    def chunks(self) -> set[int]:
        """The chunks that blocks are cut from."""
        self._refuse_nested()
        with self._lock:
            return set(self._sizes)

    def empty_chunks(self) -> list[int]:
        """Remove the chunks that have no block in use, and return their numbers."""
        self._refuse_nested()
        with self._lock:
            self._holder = get_ident()
            self._settle()
            free = self._free_chunks()
            self._torn = True
            for chunk in free:
                self._remove(chunk, 0, self._sizes.pop(chunk))
            self._torn = False
            self._holder = 0
            return free

    def _free_chunks(self) -> list[int]:
        return [chunk for chunk, size in self._sizes.items() if self._starts.get((chunk, 0)) == size]

    def _refuse_nested(self) -> None:
        """Raise if this thread is already inside a method, further up its stack: it would deadlock."""
        if self._holder == get_ident() and self._lock.locked():
            raise DispatchError(
                "a destructor or signal handler allocated memory while its thread was inside the allocator"
            )

    def _settle(self) -> None:
        """Free the blocks that were given back; first rebuild lists that an exception has left half changed."""
        if self._torn:
            self._rebuild()
        while self._returned:
            chunk, offset, nbytes = self._returned[0]
            self._torn = True
            self._free(chunk, offset, nbytes)
            self._returned.popleft()
            self._torn = False

    def _rebuild(self) -> None:
        self._by_size, self._starts, self._ends = [], {}, {}
        self.used = sum(self._out.values())
        ends = dict.fromkeys(self._sizes, 0)
        for (chunk, offset), nbytes in sorted(self._out.items()):
            if offset > ends[chunk]:
                self._add(chunk, ends[chunk], offset - ends[chunk])
            ends[chunk] = offset + nbytes
        for chunk, end in ends.items():
            if end < self._sizes[chunk]:
                self._add(chunk, end, self._sizes[chunk] - end)
        self._torn = False

    def _free(self, chunk: int, offset: int, nbytes: int) -> None:
        if self._out.pop((chunk, offset), None) is not None:  # None: it was freed just before an exception
            self.used -= nbytes
            before = self._ends.get((chunk, offset))
            if before is not None:
                self._remove(chunk, before, offset - before)
                nbytes, offset = nbytes + offset - before, before
            after = self._starts.get((chunk, offset + nbytes))
            if after is not None:
                self._remove(chunk, offset + nbytes, after)
                nbytes += after
            self._add(chunk, offset, nbytes)

    def _add(self, chunk: int, offset: int, nbytes: int) -> None:
        insort(self._by_size, (nbytes, chunk, offset))
        self._starts[chunk, offset] = nbytes
        self._ends[chunk, offset + nbytes] = offset

    def _remove(self, chunk: int, offset: int, nbytes: int) -> None:
        del self._by_size[bisect_left(self._by_size, (nbytes, chunk, offset))]
        del self._starts[chunk, offset]
        del self._ends[chunk, offset + nbytes]
