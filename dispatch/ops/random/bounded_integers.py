"""The kernels of bounded integers: neighbouring elements share blocks of Philox, with one word each of 32 or 64 bits.

By Lemire's method a number is the upper half of a word times the range, unless the lower half shows that the word must
be rejected. Then the number is drawn again from the element's own stream, whose words are as random as any. The loop
has one branch for this, after the store, which runs if any word of a thread is rejected. So the loop needs few
registers and no function call, for which the compiler would spill the loop's registers to memory. Words of 32 bits are
multiplied to products of 64 bits.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["WORD", "WORDS", "is_narrow", "word_values"]

WORD = 1 << 32

# If the range is that of all words (passed as 0), a number is the word itself. `least` is the number of words modulo
# the range; `least_of_64` is the same for words of 64 bits.
WORDS = r"""
#if WIDE
typedef Whole Word;
#else
typedef unsigned Word;
#endif

#if WIDE
// The words of 64 bits of a group of two numbers.
__device__ void words_of(Whole g, Whole, unsigned replay, Whole seed, Word* words, Held&)
{
    const Block block = at_place(0xfffffffeu - (unsigned)(g % 2), g / 2, replay, seed);
    for (int j = 0; j < GROUP; ++j) words[j] = block.at[2 * j] | (Word)block.at[2 * j + 1] << 32;
}
#endif

// Draws the numbers of a group whose bits are set in `rejected` again. The results are written to memory, so the loop
// need not hold them in registers.
__device__ void draw_again(
    Number* out, unsigned rejected, Whole g, unsigned replay, Whole seed, Whole offset, Whole count, Whole low,
    Whole range, Whole least)
{
    unsigned block = 0;
#pragma unroll 1
    for (unsigned j = 0; rejected >> j;) {
        const Whole at = GROUP * g + j - offset;
        Whole x = 0;
        bool done = !(rejected >> j & 1) || at >= count;  // an index before the first wraps to a large number
        if (!done) {
            const Block words = at_place(block, GROUP * g + j, replay, seed);
            const Whole one = words.at[0] | (Whole)words.at[1] << 32, other = words.at[2] | (Whole)words.at[3] << 32;
            x = one * range >= least ? one : other;
            done = x * range >= least;
            if (done) out[at] = sum(low, upper(x, range));
        }
        block = done ? 0 : block + 1;
        j += done;
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
        unsigned rejected = 0;
        Group group;
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
            const Word x = words[j];
            if (x * times < spare) rejected |= 1u << j;
            group.at[j] = sum(low, times ? upper(x, times) : x);
        }
        put(out, group, (long long)(GROUP * g - offset), count, is_aligned(out, offset));
        if (rejected) draw_again(out, rejected, g, replay, seed, offset, count, low, range, least_of_64);
    }
}
"""


def is_narrow(request: Any) -> bool:
    """Whether one word of 32 bits is enough for the range of a request for integers."""
    return bool(request.high - request.low <= WORD)


def word_values(request: Any) -> tuple[Any, ...]:
    """The kernel's arguments after the offset."""
    count = request.high - request.low
    least = WORD % count if is_narrow(request) else WORD**2 % count
    return tuple(ctypes.c_uint64(n % WORD**2) for n in (request.count, request.low, count, least, WORD**2 % count))
