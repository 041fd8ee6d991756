"""Blocks never overlap, join when they are free again, and every byte of every chunk is accounted for."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

from dispatch.isolate.arena import ALIGNMENT, GROWTH, Arena, Block


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
    arena = Arena(Chunks())
    for nbytes in (0, 1, 511, 512, 513, 10_000):
        block = arena.take(nbytes)
        assert block.nbytes >= max(nbytes, 1)
        assert block.offset % ALIGNMENT == block.nbytes % ALIGNMENT == 0


def test_what_is_given_back_is_one_block_again():
    chunks = Chunks()
    arena = Arena(chunks)
    blocks = [arena.take(1000) for _ in range(5)]
    for index in (1, 3, 0, 4, 2):  # in an order in which every kind of neighbour comes up
        arena.give(blocks[index])
    assert arena.take(GROWTH) == Block(0, 0, GROWTH)
    assert len(chunks.sizes) == 1


def test_the_tightest_free_block_is_taken():
    arena = Arena(Chunks())
    blocks = [arena.take(size) for size in (4096, 512, 1024, 512)]
    arena.give(blocks[0])
    arena.give(blocks[2])
    assert arena.take(900) == blocks[2]


def test_a_block_larger_than_a_chunk_gets_one_of_its_own():
    chunks = Chunks()
    arena = Arena(chunks)
    arena.take(10)
    assert arena.take(GROWTH + 1).chunk == 1
    assert chunks.sizes[1] > GROWTH


def test_no_room_leaves_the_arena_as_it_was():
    arena = Arena(Chunks(most=1))
    block = arena.take(512)
    with pytest.raises(MemoryError):
        arena.take(GROWTH)
    arena.give(block)
    assert arena.take(GROWTH).chunk == 0


def test_only_whole_free_chunks_are_handed_over():
    arena = Arena(Chunks())
    first, second = arena.take(GROWTH), arena.take(GROWTH)
    arena.give(second)
    assert arena.empty_chunks() == [1]
    arena.give(first)
    assert arena.empty_chunks() == [0]
    assert arena.empty_chunks() == []
    assert arena.used == 0


def test_random_blocks_never_overlap(rng):
    chunks = Chunks()
    arena, out = Arena(chunks), []
    for _ in range(3000):
        if out and rng.random() < 0.48:
            arena.give(out.pop(int(rng.integers(len(out)))))
        else:
            out.append(arena.take(int(rng.integers(1, 1 << int(rng.integers(4, 22))))))
        assert all(block.offset + block.nbytes <= chunks.sizes[block.chunk] for block in out[-1:])
    assert not overlaps(out)
    used = sum(block.nbytes for block in out)
    arena.take(1)  # settles what was given back
    assert arena.used == used + ALIGNMENT
    for block in out:
        arena.give(block)
    assert len(arena.empty_chunks()) >= len(chunks.sizes) - 1


def test_threads_take_and_give_at_once():
    arena, kept, failed = Arena(Chunks()), [], []

    def work(seed):
        own = np.random.default_rng(seed)
        mine = []
        for _ in range(500):
            mine.append(arena.take(int(own.integers(1, 5000))))
            if len(mine) > 20:
                arena.give(mine.pop(int(own.integers(20))))
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
