"""The random bits of numbers that are drawn element by element: Philox's counters, and streams of words.

A counter is (block, place, place, 2^31 + replay); the second and the third word are the halves of a 64-bit place. Only
these numbers have the upper bit of the last word set. The blocks are:

| block | place | words |
|---|---|---|
| 0, 1, 2, … | an element's index | the element's own stream: as many blocks as it needs, far fewer than 2^32 |
| 2^32 - 1 | a quad: an index divided by 4 | one word for each of four neighbours |
| 2^32 - 2, 2^32 - 3 | a quad | two words for each element: of the first two neighbours, and of the other two |
| 2^32 - 4 | a quad | two words for every two neighbours: a pair of normal numbers, one for each of them |

A word of a quad belongs to one element, or gives one of two independent normal numbers. So numbers of two calls that
are neighbours in a quad are independent, whatever their kinds. If the word of a quad is rejected or does not decide,
the element's own stream is used. `reference_distributions.py` has the same in NumPy.
"""

from __future__ import annotations

__all__ = ["BELOW", "LAST_BLOCK", "NEIGHBOURS", "STREAM", "SUM", "TAG"]

TAG = 0x80000000  # set in the last word of a counter
LAST_BLOCK = (1 << 32) - 1

STREAM = r"""
struct Draw {
    Whole seed, index;
    unsigned replay, used;
    Block block;
};

__device__ Block at_place(unsigned block, Whole place, unsigned replay, Whole seed)
{
    return philox(block, (unsigned)place, (unsigned)(place >> 32), 0x80000000u | replay, seed);
}

__device__ Draw stream_of(Whole seed, Whole index, unsigned replay)
{
    Draw d;
    d.seed = seed;
    d.index = index;
    d.replay = replay;
    d.used = 0;
    return d;
}

// The next two words of a stream, as the halves of a word of 64 bits.
__device__ Whole pair(Draw& d)
{
    if (d.used % 2 == 0) d.block = at_place(d.used / 2, d.index, d.replay, d.seed);
    const unsigned place = d.used++ % 2 * 2;
    return d.block.at[place] | (Whole)d.block.at[place + 1] << 32;
}
"""
BELOW = r"""
#ifdef __CUDACC__
__device__ unsigned upper(unsigned x, unsigned y) { return __umulhi(x, y); }
__device__ Whole upper(Whole x, Whole y) { return __umul64hi(x, y); }
#else
__device__ unsigned upper(unsigned x, unsigned y) { return (unsigned)((Whole)x * y >> 32); }
__device__ Whole upper(Whole x, Whole y) { return (Whole)((unsigned __int128)x * y >> 64); }
#endif

// An integer below `range`: the upper half of a product. The word is rejected if the lower half is less than 2^64
// modulo the range.
__device__ Whole below(Draw& d, Whole range, Whole least)
{
    for (;;) {
        const Whole x = pair(d);
        if (x * range >= least) return upper(x, range);
    }
}
"""
# Needs GROUPS (groups.py) before it.
# For numbers of 8 bytes two groups share a block. Two neighbouring threads compute one block each, one for their
# current groups and one for their next groups, and exchange halves. So pairs of threads begin and end with pairs of
# groups.
NEIGHBOURS = r"""
constexpr Whole IN_PAIRS = GROUP == 2 ? ~(Whole)1 : ~(Whole)0;

struct Held { unsigned words[2]; bool is_valid; };

// The words of 32 bits of a group: a quad's block, or half of it. A thread's next group is `step` groups further.
__device__ void words_of(Whole g, Whole step, unsigned replay, Whole seed, unsigned* words, Held& held)
{
#ifdef __CUDACC__
    if (GROUP == 2) {
        if (held.is_valid) {
            words[0] = held.words[0], words[1] = held.words[1];
        } else {
            const bool later = g % 2;
            const Block block = at_place(0xffffffffu, (later ? g - 1 + step : g) / 2, replay, seed);
            const unsigned pair = 3u << (threadIdx.x % 32 & 30);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const unsigned own = later ? block.at[2 + j] : block.at[j];
                const unsigned theirs = __shfl_xor_sync(pair, later ? block.at[j] : block.at[2 + j], 1);
                words[j] = later ? theirs : own;
                held.words[j] = later ? own : theirs;
            }
        }
        held.is_valid = !held.is_valid;
        return;
    }
#endif
    const Block block = at_place(0xffffffffu, g / (4 / GROUP), replay, seed);
    const bool later = GROUP == 2 && g % 2;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) words[j] = later ? block.at[(j + 2) % 4] : block.at[j];
}
"""
# The sum is computed with as many bits as the integers have, or with 32, and wraps around.
SUM = r"""
__device__ Number sum(Whole low, Whole x)
{
    return sizeof(Number) < 8 ? (Number)((unsigned)low + (unsigned)x) : (Number)(low + x);
}
"""
