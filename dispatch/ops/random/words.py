"""The kernel of whole numbers of a range of 2^32 at most: a word each, four neighbours from one block of Philox.

By Lemire's method a number is the upper half of a word times the range, unless the lower half tells that the word is
one too many: then it is drawn anew from the element's own stream (draws.py), which is as good as any other word. An
H100 made 180 · 10^9 of i32 a second so, and 95 with a block for each element.
"""

from __future__ import annotations

from typing import Any

__all__ = ["WORD", "WORDS", "is_narrow"]

WORD = 1 << 32

# `least` is 2^32 modulo the range. What few words need is a call, so that the loop stays small.
WORDS = r"""
#ifdef __CUDACC__
__noinline__
#endif
__device__ Whole anew(Whole seed, Whole index, unsigned replay, Whole range)
{
    Draw d;
    d.seed = seed;
    d.index = index;
    d.replay = replay;
    d.used = 0;
    return below(d, range);
}

typedef NUMBER Number;
struct alignas(sizeof(Number) < 4 ? 4 * sizeof(Number) : 16) Quad { Number at[4]; };

extern "C" __global__ void FUNCTION(
    Number* out, Whole seed, Whole offset, Whole count, Whole m, Whole n, double a, double, double,
    const unsigned* replays)
{
    const Whole step = (Whole)gridDim.x * blockDim.x, end = (offset + count + 3) / 4;
    const unsigned replay = replays ? *replays : 0;
    const Whole least = (Whole)a;
    const bool whole = offset % 4 == 0 && (Whole)out % alignof(Quad) == 0;
    for (Whole q = offset / 4 + (Whole)blockIdx.x * blockDim.x + threadIdx.x; q < end; q += step) {
        const Block block = philox(0xffffffffu, (unsigned)q, (unsigned)(q >> 32), 0x80000000u | replay, seed);
        Quad quad;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const Whole x = block.at[j] * n;
            quad.at[j] = (Number)(m + ((x & 0xffffffff) >= least ? x >> 32 : anew(seed, 4 * q + j, replay, n)));
        }
        const long long at = (long long)(4 * q - offset);
        if (whole && at + 4 <= (long long)count) {
            *(Quad*)(out + at) = quad;
        } else {
            for (int j = 0; j < 4; ++j)
                if (at + j >= 0 && at + j < (long long)count) out[at + j] = quad.at[j];
        }
    }
}
"""


def is_narrow(request: Any) -> bool:
    """Whether a request is for whole numbers of a range that one word of 32 bits is enough for."""
    return bool(request.op == "random_integers" and request.high - request.low <= WORD)
