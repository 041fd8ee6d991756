"""Where the bits of numbers come from that are drawn element by element: counters of Philox, and streams of words.

A counter is (block, place, place, 2^31 + replay), whose second and third word are the halves of a place; no other
numbers have the upper bit of the last word set. These blocks there are:

| block | place | whose words |
|---|---|---|
| 0, 1, 2, … | an element's index | the element's own stream: as many blocks as it needs, far fewer than 2^32 |
| 2^32 - 1 | a quad: an index divided by 4 | a word for each of four neighbours |
| 2^32 - 2, 2^32 - 3 | a quad | two words for each: of the first two neighbours, and of the other two |
| 2^32 - 4 | a quad | two words for each two neighbours: a pair of normal numbers, of which each takes one |

A word of a quad is its element's alone, or gives a normal number that is independent of the other one: so numbers of
two calls that are neighbours in a quad are independent, whatever kinds they are. What a word of a quad does not decide,
an element's own stream does. `reference_distributions.py` has the same in NumPy.
"""

from __future__ import annotations

__all__ = ["BELOW", "LAST_BLOCK", "NEIGHBOURS", "STREAM", "SUM", "TAG"]

TAG = 0x80000000  # of the last word of a counter
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

// The next two words of a stream, as the halves of one.
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

// A whole number below `range`: the upper half of a product, whose lower half tells that the word is one too many,
// where it is less than 2^64 modulo the range.
__device__ Whole below(Draw& d, Whole range, Whole least)
{
    for (;;) {
        const Whole x = pair(d);
        if (x * range >= least) return upper(x, range);
    }
}
"""
# Behind GROUPS (groups.py).
# Of numbers of 8 bytes two groups share a block: two neighbouring threads compute one each, that of their groups now or
# that of their next ones, and exchange halves. So pairs of threads begin with pairs of groups, and end with them.
NEIGHBOURS = r"""
constexpr Whole IN_PAIRS = GROUP == 2 ? ~(Whole)1 : ~(Whole)0;

struct Held { unsigned words[2]; bool is_there; };

// The words of 32 bits of a group, of which every next one lies `step` further: a quad's block, or half of it.
__device__ void words_of(Whole g, Whole step, unsigned replay, Whole seed, unsigned* words, Held& held)
{
#ifdef __CUDACC__
    if (GROUP == 2) {
        if (held.is_there) {
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
        held.is_there = !held.is_there;
        return;
    }
#endif
    const Block block = at_place(0xffffffffu, g / (4 / GROUP), replay, seed);
    const bool later = GROUP == 2 && g % 2;
#pragma unroll
    for (int j = 0; j < GROUP; ++j) words[j] = later ? block.at[(j + 2) % 4] : block.at[j];
}
"""
# In as many bits as whole numbers have, or 32, which their sum is taken modulo.
SUM = r"""
__device__ Number sum(Whole low, Whole x)
{
    return sizeof(Number) < 8 ? (Number)((unsigned)low + (unsigned)x) : (Number)(low + x);
}
"""
