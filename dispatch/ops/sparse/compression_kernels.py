"""Kernels that make a dense matrix sparse, in CUDA C++: a count of each line, a scan of the counts, and the filling.

cuSPARSE's DenseToSparse writes the elements of a line in any order if a matrix is large; these kernels write them
sorted, and give the same bits in each run. A line is a row of the matrix, or a column for CSC. A block processes a
segment of 32 lines, by tiles of 32 by 32 that are read along memory, whatever the order of the matrix. Then each warp
processes one line of a tile, and one ballot counts the elements before each one. Counts are ordered by line, and by
segment within a line, so that their exclusive scan gives the index at which each warp begins to write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["CHUNK", "LINES", "SCAN", "SEGMENT", "SOURCE", "THREADS", "options"]

THREADS = 256
LINES = 32  # lines of a block
SEGMENT = 1024  # elements of each line that a block reads
CHUNK = 4096  # counts that a block scans
BITS = {2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}  # by the size in bytes of a real number
INDICES = {4: "int", 8: "long long"}

SCAN = r"""
// Each block makes the counts of a chunk what stands before each in the chunk, and tells the sum of all.
extern "C" __global__ void scan_counts(Int* counts, Int* sums, Int count, Int chunk)
{
    __shared__ Int up_to[THREADS];
    const int thread = threadIdx.x;
    const Int begin = blockIdx.x * chunk, end = begin + chunk < count ? begin + chunk : count;
    Int before = 0;
    for (Int first = begin; first < end; first += THREADS) {
        const Int i = first + thread, own = i < end ? counts[i] : 0;
        up_to[thread] = own;
        __syncthreads();
        for (int step = 1; step < THREADS; step *= 2) {
            const Int more = thread >= step ? up_to[thread - step] : 0;
            __syncthreads();
            up_to[thread] += more;
            __syncthreads();
        }
        if (i < end) counts[i] = before + up_to[thread] - own;
        before += up_to[THREADS - 1];
        __syncthreads();
    }
    if (thread == 0) sums[blockIdx.x] = before;
}
"""
SOURCE = (
    r"""
typedef long long Int;
struct __align__(sizeof(BITS) * PARTS) Element { BITS part[PARTS]; };

// All but 0 and -0, whose bits but the sign's are 0: NaN is an element.
__device__ bool is_there(Element x)
{
    bool found = false;
    for (int part = 0; part < PARTS; ++part) found |= (BITS)(x.part[part] << 1) != 0;
    return found;
}

struct Source { const Element* at; Int lines, across, line_step, step; };

// The element of a tile that this thread reads as its number `turn` of four: neighbours in memory by a warp.
struct Spot { int line, place; };
__device__ Spot spot_of(Source a, int turn)
{
    const int lane = threadIdx.x % 32, other = threadIdx.x / 32 + 8 * turn;
    const bool along = llabs(a.step) <= llabs(a.line_step);
    return along ? Spot{other, lane} : Spot{lane, other};
}

__device__ Element element(Source a, Int line, Int place)
{
    Element x = {};
    if (line < a.lines && place < a.across) x = a.at[line * a.line_step + place * a.step];
    return x;
}

extern "C" __global__ void count_elements(
    const Element* at, Int* counts, Int lines, Int across, Int line_step, Int step, Int segments)
{
    __shared__ bool there[32][33];
    const Source a = {at, lines, across, line_step, step};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Int first_line = blockIdx.x / segments * 32, segment = blockIdx.x % segments;
    const Int end = segment * SEGMENT + SEGMENT < across ? segment * SEGMENT + SEGMENT : across;
    Int found[4] = {};
    for (Int first = segment * SEGMENT; first < end; first += 32) {
        for (int turn = 0; turn < 4; ++turn) {
            const Spot at = spot_of(a, turn);
            there[at.line][at.place] = is_there(element(a, first_line + at.line, first + at.place));
        }
        __syncthreads();
        for (int turn = 0; turn < 4; ++turn)
            found[turn] += __popc(__ballot_sync(0xffffffffu, there[warp + 8 * turn][lane]));
        __syncthreads();
    }
    for (int turn = 0; turn < 4; ++turn) {
        const Int line = first_line + warp + 8 * turn;
        if (lane == 0 && line < lines) counts[line * segments + segment] = found[turn];
    }
}
"""
    + SCAN
    + r"""
// `minor` are the places in a line, `major` the line of each element or null, `ends` where lines begin or null.
extern "C" __global__ void fill_elements(
    const Element* at, const Int* counts, const Int* sums, const Int* total, Element* values, INDEX* minor,
    INDEX* major, INDEX* ends, Int lines, Int across, Int line_step, Int step, Int segments)
{
    __shared__ Element tile[32][33];
    const Source a = {at, lines, across, line_step, step};
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Int first_line = blockIdx.x / segments * 32, segment = blockIdx.x % segments;
    const Int end = segment * SEGMENT + SEGMENT < across ? segment * SEGMENT + SEGMENT : across;
    Int next[4] = {};
    for (int turn = 0; turn < 4; ++turn) {
        const Int line = first_line + warp + 8 * turn, slot = line * segments + segment;
        if (line >= lines) continue;
        next[turn] = counts[slot] + sums[slot / CHUNK];
        if (ends && segment == 0 && lane == 0) ends[line] = (INDEX)next[turn];
    }
    if (ends && blockIdx.x == 0 && threadIdx.x == 0) ends[lines] = (INDEX)*total;
    for (Int first = segment * SEGMENT; first < end; first += 32) {
        for (int turn = 0; turn < 4; ++turn) {
            const Spot at = spot_of(a, turn);
            tile[at.line][at.place] = element(a, first_line + at.line, first + at.place);
        }
        __syncthreads();
        for (int turn = 0; turn < 4; ++turn) {
            const int line = warp + 8 * turn;
            const Element x = tile[line][lane];
            const bool there = is_there(x);
            const unsigned all = __ballot_sync(0xffffffffu, there);
            if (there) {
                const Int target = next[turn] + __popc(all & ((1u << lane) - 1));
                values[target] = x;
                minor[target] = (INDEX)(first + lane);
                if (major) major[target] = (INDEX)(first_line + line);
            }
            next[turn] += __popc(all);
        }
        __syncthreads();
    }
}
"""
)


def options(dtype: Dtype, index_bytes: int) -> tuple[str, ...]:
    """NVRTC's options for elements of a dtype and indices of so many bytes."""
    parts = 2 if dtype.is_complex else 1
    words = {"BITS": BITS[dtype.itemsize // parts], "PARTS": parts, "INDEX": INDICES[index_bytes]}
    words |= {"THREADS": THREADS, "SEGMENT": SEGMENT, "CHUNK": CHUNK}
    return ("-std=c++17", *(f"-D{name}={word}" for name, word in words.items()))
