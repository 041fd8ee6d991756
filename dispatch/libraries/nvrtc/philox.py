"""Philox 4x32-10, the bit generator of this library's kernels for random numbers, in CUDA C++ and in NumPy.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Numbers have the default ordering
of cuRAND's host API: four neighbours, a quad, are one block of a subsequence (two blocks if an element takes 64 bits).
The next quad belongs to the next subsequence, and after 65,536 quads comes the first one's next block. The last word of
the counter is not used by cuRAND's sequences; here it counts the replays of a captured call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dispatch.device.layout import Array

__all__ = ["PHILOX", "QUAD", "SUBSEQUENCES", "philox", "words"]

QUAD = 4  # elements
SUBSEQUENCES = 1 << 16
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the key in each round
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)

PHILOX = r"""
typedef unsigned long long Whole;
struct Block { unsigned at[4]; };

// A product of words, whole. As one of 64 bits NVRTC adds a zero to each upper half: a third of a block's instructions.
__device__ Whole product(unsigned x, unsigned y)
{
#ifdef __CUDACC__
    Whole made;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(made) : "r"(x), "r"(y));
    return made;
#else
    return (Whole)x * y;
#endif
}

__device__ Block philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, Whole seed)
{
    unsigned key0 = (unsigned)seed, key1 = (unsigned)(seed >> 32);
#pragma unroll
    for (int turn = 0; turn < 10; ++turn) {
        const Whole one = product(c0, 0xD2511F53u), two = product(c2, 0xCD9E8D57u);
        c0 = (unsigned)(two >> 32) ^ c1 ^ key0;
        c2 = (unsigned)(one >> 32) ^ c3 ^ key1;
        c1 = (unsigned)two;
        c3 = (unsigned)one;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    Block made = {{c0, c1, c2, c3}};
    return made;
}

// A block of the sequence as cuRAND's host API lays it out: the step-th of the quad's subsequence.
__device__ Block block_of(Whole quad, Whole step, unsigned replay, Whole seed)
{
    return philox((unsigned)step, (unsigned)(step >> 32), (unsigned)(quad & 0xffff), replay, seed);
}
"""


def philox(counter: tuple[Array, Array, Array, Array], seed: int) -> Array:
    """The four words of each counter, along a last axis; a counter's words are arrays of u64 below 2^32."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(ROUNDS):
        one, two = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = (two >> HALF) ^ c1 ^ np.uint64(key0), (one >> HALF) ^ c3 ^ np.uint64(key1)
        c1, c3 = two & LOW, one & LOW
        key0, key1 = (key0 + WEYL[0]) & 0xFFFFFFFF, (key1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], -1).astype(np.uint32)


def words(seed: int, offset: int, count: int, each: int) -> Array:
    """The words of `count` elements from `offset` on, `each` words of 32 bits per element: u32[count, each]."""
    quads = np.arange(offset // QUAD, -(-(offset + count) // QUAD), dtype=np.uint64)
    step, subsequence = quads // np.uint64(SUBSEQUENCES), quads % np.uint64(SUBSEQUENCES)
    blocks = []
    for number in range(each):
        counter = step * np.uint64(each) + np.uint64(number)
        blocks.append(philox((counter & LOW, counter >> HALF, subsequence, np.zeros_like(quads)), seed))
    array = np.stack(blocks, 1).reshape(-1, each)
    return array[offset % QUAD :][:count]
