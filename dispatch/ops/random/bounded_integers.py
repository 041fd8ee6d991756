"""The kernels of whole numbers of a range: neighbours share blocks of Philox, a word each, of 32 bits or of 64.

By Lemire's method a number is the upper half of a word times the range, unless the lower half tells that the word is
one too many: then it is drawn anew from the element's own stream, which is as good as any other word. The loop has one
branch for this, taken where any word of a thread's is one too many, and behind their store: so the loop needs few
registers, and no call, which on a GPU would have the compiler keep what the loop holds in memory. Words of 32 bits are
multiplied as such, into 64.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["WORD", "WORDS", "is_narrow", "word_values"]

WORD = 1 << 32

# Of a range of all words, 0 here, a number is the word itself. `least` is their number modulo the range, and that of
# words of 64 bits is `least_of_64`.
WORDS = r"""
#if WIDE
typedef Whole Word;
#else
typedef unsigned Word;
#endif

#if WIDE
// The words of a group, two numbers, of 64 bits.
__device__ void words_of(Whole g, Whole, unsigned replay, Whole seed, Word* words, Held&)
{
    const Block block = at_place(0xfffffffeu - (unsigned)(g % 2), g / 2, replay, seed);
    for (int j = 0; j < GROUP; ++j) words[j] = block.at[2 * j] | (Word)block.at[2 * j + 1] << 32;
}
#endif

// Draws those numbers of a group anew whose bits are in `missed`, where they lie: the loop needs to hold none of them.
__device__ void draw_anew(
    Number* out, unsigned missed, Whole g, unsigned replay, Whole seed, Whole offset, Whole count, Whole low,
    Whole range, Whole least)
{
    unsigned block = 0;
#pragma unroll 1
    for (unsigned j = 0; missed >> j;) {
        const Whole at = GROUP * g + j - offset;
        Whole x = 0;
        bool taken = !(missed >> j & 1) || at >= count;  // one before the first is a large number
        if (!taken) {
            const Block words = at_place(block, GROUP * g + j, replay, seed);
            const Whole one = words.at[0] | (Whole)words.at[1] << 32, other = words.at[2] | (Whole)words.at[3] << 32;
            x = one * range >= least ? one : other;
            taken = x * range >= least;
            if (taken) out[at] = sum(low, upper(x, range));
        }
        block = taken ? 0 : block + 1;
        j += taken;
    }
}

extern "C" __global__ void FUNCTION(
    Number* out, Whole seed, Whole offset, Whole count, Whole low, Whole range, Whole least, Whole least_of_64,
    const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x, end = (offset + count + GROUP - 1) / GROUP;
    const unsigned replay = replays ? *replays : 0;
    const Word times = (Word)range, spare = (Word)least;
    const Whole first = (offset / GROUP & IN_PAIRS) + (Whole)blockIdx.x * blockDim.x;
    Held held = {};
    for (Whole g = first + threadIdx.x; (g & IN_PAIRS) < end; g += step) {
        Word words[GROUP];
        words_of(g, step, replay, seed, words, held);
        unsigned missed = 0;
        Group group;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const Word x = words[j];
            if (x * times < spare) missed |= 1u << j;
            group.at[j] = sum(low, times ? upper(x, times) : x);
        }
        put(out, group, (long long)(GROUP * g - offset), count, is_aligned(out, offset));
        if (missed) draw_anew(out, missed, g, replay, seed, offset, count, low, range, least_of_64);
    }
}
"""


def is_narrow(request: Any) -> bool:
    """Whether one word of 32 bits is enough for the range of a request for whole numbers."""
    return bool(request.high - request.low <= WORD)


def word_values(request: Any) -> tuple[Any, ...]:
    """What the kernel takes behind the offset."""
    count = request.high - request.low
    least = WORD % count if is_narrow(request) else WORD**2 % count
    return tuple(ctypes.c_uint64(n % WORD**2) for n in (request.count, request.low, count, least, WORD**2 % count))
