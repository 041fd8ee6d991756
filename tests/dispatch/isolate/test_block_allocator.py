"""Blocks never overlap, join when they are free again, and every byte of every chunk is accounted for."""

from __future__ import annotations

import itertools
import linecache
import sys
import threading
from functools import partial

import numpy as np
import pytest

from dispatch.device.block_allocator import ALIGNMENT, GROWTH, Block, BlockAllocator
from dispatch.errors import DispatchError, OutOfMemory


class Chunks:
    """Makes chunks of just the size asked for, and remembers them."""

    def __init__(self, most=None):
        self.sizes, self.most = {}, most

    def __call__(self, nbytes):
        if self.most is not None and len(self.sizes) == self.most:
            raise MemoryError("no more chunks")
        number = len(self.sizes)
        self.sizes[number] = nbytes
        return number, nbytes


def overlaps(blocks):
    ordered = sorted(blocks)
    return [
        (one, other)
        for one, other in itertools.pairwise(ordered)
        if one.chunk == other.chunk and one.offset + one.nbytes > other.offset
    ]


def test_blocks_are_aligned_and_large_enough():
    allocator = BlockAllocator(Chunks())
    for nbytes in (0, 1, 511, 512, 513, 10_000):
        block = allocator.take(nbytes)
        assert block.nbytes >= max(nbytes, 1)
        assert block.offset % ALIGNMENT == block.nbytes % ALIGNMENT == 0


def test_what_is_given_back_is_one_block_again():
    chunks = Chunks()
    allocator = BlockAllocator(chunks)
    blocks = [allocator.take(1000) for _ in range(5)]
    for index in (1, 3, 0, 4, 2):  # in an order in which every kind of neighbour comes up
        allocator.give(blocks[index])
    assert allocator.take(GROWTH) == Block(0, 0, GROWTH)
    assert len(chunks.sizes) == 1


def test_the_tightest_free_block_is_taken():
    allocator = BlockAllocator(Chunks())
    blocks = [allocator.take(size) for size in (4096, 512, 1024, 512)]
    allocator.give(blocks[0])
    allocator.give(blocks[2])
    assert allocator.take(900) == blocks[2]


def test_a_block_larger_than_a_chunk_gets_one_of_its_own():
    chunks = Chunks()
    allocator = BlockAllocator(chunks)
    allocator.take(10)
    assert allocator.take(GROWTH + 1).chunk == 1
    assert chunks.sizes[1] > GROWTH


def test_no_room_leaves_the_arena_as_it_was():
    allocator = BlockAllocator(Chunks(most=1))
    block = allocator.take(512)
    with pytest.raises(MemoryError):
        allocator.take(GROWTH)
    allocator.give(block)
    assert allocator.take(GROWTH).chunk == 0


def test_only_whole_free_chunks_are_handed_over():
    allocator = BlockAllocator(Chunks())
    first, second = allocator.take(GROWTH), allocator.take(GROWTH)
    allocator.give(second)
    assert allocator.empty_chunks() == [1]
    allocator.give(first)
    assert allocator.empty_chunks() == [0]
    assert allocator.empty_chunks() == []
    assert allocator.used == 0


def test_random_blocks_never_overlap(rng):
    chunks = Chunks()
    allocator, out = BlockAllocator(chunks), []
    for _ in range(3000):
        if out and rng.random() < 0.48:
            allocator.give(out.pop(int(rng.integers(len(out)))))
        else:
            out.append(allocator.take(int(rng.integers(1, 1 << int(rng.integers(4, 22))))))
        assert all(block.offset + block.nbytes <= chunks.sizes[block.chunk] for block in out[-1:])
    assert not overlaps(out)
    used = sum(block.nbytes for block in out)
    allocator.take(1)  # settles what was given back
    assert allocator.used == used + ALIGNMENT
    for block in out:
        allocator.give(block)
    assert len(allocator.empty_chunks()) >= len(chunks.sizes) - 1


def test_threads_take_and_give_at_once():
    allocator, kept, failed = BlockAllocator(Chunks()), [], []

    def work(seed):
        own = np.random.default_rng(seed)
        mine = []
        for _ in range(500):
            mine.append(allocator.take(int(own.integers(1, 5000))))
            if len(mine) > 20:
                allocator.give(mine.pop(int(own.integers(20))))
        kept.extend(mine)
        if overlaps(mine):
            failed.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not overlaps(kept)


# -- what an exception leaves behind --------------------------------------------------------------------------------
class Interrupt(BaseException):
    """What a signal handler may raise, between any two lines of a main thread."""


def interrupted(action, line):
    """Run until so many lines of the allocator have begun, and raise there; False where it ended before."""
    left = line
    here = BlockAllocator.take.__code__.co_filename

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename != here:
            return None
        # A `with` is traced once more as it is left, before it lets go: there the interpreter looks at no signals.
        if event == "line" and not linecache.getline(here, frame.f_lineno).lstrip().startswith("with "):
            left -= 1
            if left < 0:
                raise Interrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupt:
        return True
    finally:
        sys.settrace(previous)
    return False


def check_sound(allocator, chunks, out):
    """Blocks that are out are whole, and all that is not out can be had, in one piece where it is one."""
    assert not overlaps(out)
    lost = set(allocator._out.items()) - {((block.chunk, block.offset), block.nbytes) for block in out}
    assert len(lost) <= 1, "one that was cut as the exception came, and that nobody was given"
    taken = []
    while allocator._by_size:
        taken.append(allocator.take(allocator._by_size[-1][0], growth=0))
        assert not overlaps([*out, *taken])
    assert set(chunks.sizes) == set(allocator._sizes), "nothing had to be made for it"
    everything = sum(block.nbytes for block in [*out, *taken]) + sum(nbytes for _, nbytes in lost)
    assert everything == sum(chunks.sizes.values()) == allocator.used
    for block in taken:
        allocator.give(block)


@pytest.mark.parametrize("what", ["take", "take in a new chunk", "take a whole one", "give", "count", "empty"])
def test_an_exception_between_any_two_lines_leaves_all_sound(what):
    line = 0
    while True:
        chunks = Chunks()
        allocator = BlockAllocator(chunks)
        out = [allocator.take(1000) for _ in range(7)]
        spare = allocator.take(GROWTH)
        for index in (5, 3, 1):
            allocator.give(out.pop(index))
        if what in ("give", "empty"):
            allocator.give(spare)
            allocator.give(out.pop())
        else:
            out.append(spare)
        known = dict(chunks.sizes)
        actions = {
            "take": partial(allocator.take, 600),
            "take in a new chunk": partial(allocator.take, 2 * GROWTH),
            "take a whole one": partial(allocator.take, 1000),
            "give": partial(allocator.take, 512),
            "count": allocator.bytes_in_use,
            "empty": allocator.empty_chunks,
        }
        was_cut = interrupted(actions[what], line)
        if what != "empty":
            forgotten = set(chunks.sizes) - allocator.chunks()
            assert forgotten <= set(chunks.sizes) - set(known), "a chunk that was just made, and that trim() sees"
        for number in set(chunks.sizes) - allocator.chunks():
            del chunks.sizes[number]
        if not was_cut and what.startswith(("take", "give")):
            break
        allocator.bytes_in_use()
        check_sound(allocator, chunks, out)
        if not was_cut:
            break
        line += 1
    assert line > 5


def test_a_signal_handler_or_destructor_is_refused_and_not_deadlocked():
    allocator = BlockAllocator(Chunks())
    refused = []

    def again(nbytes):
        for call in (lambda: allocator.take(1), allocator.bytes_in_use, allocator.empty_chunks, allocator.chunks):
            with pytest.raises(DispatchError, match="destructor or signal handler"):
                call()
            refused.append(call)
        return 0, nbytes

    allocator._grow = again
    assert allocator.take(512) == Block(0, 0, 512)
    assert len(refused) == 4
    assert allocator.take(512).offset == 512


def test_a_thread_that_got_nothing_is_not_taken_to_be_there_still(monkeypatch):
    allocator = BlockAllocator(Chunks())
    lock = allocator._lock

    class HeldByAnother:
        """A lock that another thread holds as this one asks, and has let go of as this one takes it."""

        locked = staticmethod(lambda: True)
        __enter__, __exit__ = lock.__enter__, lock.__exit__

    def refuse(_):
        raise OutOfMemory("full")

    grow = allocator._grow
    monkeypatch.setattr(allocator, "_grow", refuse)
    with pytest.raises(OutOfMemory):
        allocator.take(512)
    monkeypatch.setattr(allocator, "_grow", grow)
    monkeypatch.setattr(allocator, "_lock", HeldByAnother())
    assert allocator.take(512).nbytes == 512
