"""The kernel of a sparse matrix times a vector in CUDA C++, for contiguous rows: CSR, or the transpose of CSC.

Rows and elements are one path of rows + nnz steps: all elements of a row, then its end. Each block does the same number
of steps, whatever the pattern, following Merrill and Garland, Merge-based Parallel Sparse Matrix-Vector Multiplication
(https://doi.org/10.1109/SC.2016.57). A block searches for its first row with all its threads, and finds the row that
it ends in among the row ends that it reads anyway.

A row of at most MAX_ROW elements is summed up by its first block, which continues into the next block's steps for it. A
longer one is summed up by several blocks: each stores its partial sum in memory of the plan, and the last block to
finish adds these in order. So it is one launch, and the order of a sum depends on the pattern and the tile alone. If
FINISHED is defined, a caller's epilogue is applied to the sum before it is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["INDICES", "NAME", "REAL", "SOURCE", "Tile", "options", "tile_of"]

NAME = "multiply_rows"
REAL = {C64: F32, C128: F64}
INDICES = {4: "int", 8: "long long"}  # by size in bytes
# Below this, blocks of fewer steps are faster, because larger blocks are too few: 5.5 us instead of 6.2 for 10^5
# elements of f64 on an H200. Above it, six blocks per multiprocessor, with some registers spilled, hide more of x's
# latency: 13.2 us instead of 15.5 at 10^6, while at 10^7 some patterns were a little faster and others slower.
FEW_STEPS = 2**19
BITS = {2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}  # the type of a load of so many bytes


class Tile(NamedTuple):
    """How the steps of the path are split.

    Attributes:
        threads: of a block; a multiple of 32.
        items: steps of a thread, at most 32; odd numbers cause the fewest bank conflicts in shared memory.
        max_row: elements of the longest row that one block sums up alone; fewer than half of a block's steps.
        blocks: resident blocks of each multiprocessor, which limits the registers of a thread.
        load: how elements and their columns are read: __ldcs for data that is read once, or __ldg.
    """

    threads: int = 256
    items: int = 7
    max_row: int = 256
    blocks: int = 4
    load: str = "__ldcs"

    @property
    def steps(self) -> int:
        """The steps of a block; the additional steps for its last row come after them."""
        return self.threads * self.items - self.max_row


def tile_of(dtype: Dtype, steps: int) -> Tile:
    """The tile for a dtype and a path of so many steps; it depends on nothing else, because the order of sums does."""
    if dtype is C128 or steps <= FEW_STEPS:
        return Tile(items=5, blocks=4 if dtype is C128 else 5)
    return Tile(blocks=6)


SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;
typedef REAL Real;
struct alignas(sizeof(STORED) * PARTS) Number { STORED part[PARTS]; };
struct alignas(sizeof(RESULT) * PARTS) Result { RESULT part[PARTS]; };
struct alignas(sizeof(Real) * PARTS) Sum { Real part[PARTS]; };
const unsigned ALL = 0xffffffffu;
const int WARPS = THREADS / 32, CAPACITY = THREADS * ITEMS, STEPS = CAPACITY - MAX_ROW;
const int PROBES = THREADS < 128 ? THREADS : 128;  // of the search, in each round
const int ENDS = THREADS + STEPS + 2;  // row ends that a block may look at: those left by the search, and its own
const int FAR = 1 << 29;  // beyond all that a block has
static_assert(2 * MAX_ROW < CAPACITY && ITEMS <= 32, "a block's steps suffice");

// Of a block's part of a long row.
enum { CLOSES = 1, OPENS = 2, INSIDE = 4 };  // it ends one that began before; begins one, or goes through, unfinished

__device__ Sum added(const Sum& x, const Sum& y)
{
    Sum sum;
    for (int i = 0; i < PARTS; ++i) sum.part[i] = x.part[i] + y.part[i];
    return sum;
}

__device__ Sum times(const Sum& x, const Sum& y)
{
    Sum product;
#if PARTS == 2
    product.part[0] = x.part[0] * y.part[0] - x.part[1] * y.part[1];
    product.part[1] = x.part[0] * y.part[1] + x.part[1] * y.part[0];
#else
    product.part[0] = x.part[0] * y.part[0];
#endif
    return product;
}

__device__ Sum as_sum(const Number& x)
{
    Sum sum;
    for (int i = 0; i < PARTS; ++i) sum.part[i] = read(x.part[i]);
    return sum;
}

__device__ Number loaded(const Number* at)
{
    union { BITS bits; Number number; } both;
    both.bits = LOAD((const BITS*)at);
    return both.number;
}

// What other blocks have written, and no cache of this one's own may have as it was.
__device__ Sum fetched(const Sum* at)
{
    Sum sum;
    for (int i = 0; i < PARTS; ++i) sum.part[i] = __ldcg((const Real*)at + i);
    return sum;
}

// The sum of the threads before this one, from the last of them on that starts anew; `whole` is that of all threads.
__device__ Sum sum_before(bool is_new, Sum sum, Sum& whole)
{
    __shared__ Sum sums[WARPS];
    __shared__ unsigned news[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const unsigned marks = __ballot_sync(ALL, is_new), upto = marks & (ALL >> (31 - lane));
    const int first = upto ? 31 - __clz(upto) : 0;
    for (int by = 1; by < 32; by *= 2) {
        Sum other;
        for (int i = 0; i < PARTS; ++i) other.part[i] = __shfl_up_sync(ALL, sum.part[i], by);
        if (lane - by >= first) sum = added(other, sum);
    }
    if (lane == 31) sums[warp] = sum, news[warp] = marks;
    Sum before;
    for (int i = 0; i < PARTS; ++i) before.part[i] = __shfl_up_sync(ALL, sum.part[i], 1);
    __syncthreads();
    Sum carried = {}, of_warps = {};
    for (int i = 0; i < WARPS; ++i) {
        if (i == warp) of_warps = carried;
        carried = news[i] ? sums[i] : added(carried, sums[i]);
    }
    whole = carried;
    if (!lane) return of_warps;
    return marks & ~(ALL << lane) ? before : added(of_warps, before);
}

__device__ int clamp_far(Int x) { return x < -FAR ? -FAR : x > FAR ? FAR : (int)x; }
__device__ int clamp(int x, int least, int most) { return x < least ? least : x > most ? most : x; }

// A place on the path: a row of those that were read, and where it begins and ends.
struct PathPoint { int row, begin, end; };

// `done` counts blocks, and behind it is whether there is a long row; then come what each block says of one. They are
// 0 before a launch and after it. Without `y` nothing is added.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) multiply_rows(
    const Number* __restrict__ values, const LINE* __restrict__ offsets, const PLACE* __restrict__ columns,
    const Number* __restrict__ x, const Result* y, Result* out, Sum alpha, Sum beta, Int rows, Int count, Int base,
    Int x_step, Int y_step, Int out_step, int ahead, unsigned* done, Int* long_rows, Sum* heads, Sum* tails)
{
    __shared__ union { int ends[ENDS]; Sum sums[CAPACITY + (THREADS + 4) * sizeof(int) / sizeof(Sum) + 2]; } storage;
    __shared__ PathPoint points[2];
    __shared__ bool is_last;
    unsigned *const is_any = done + 1, *const states = done + 4;
    const int thread = threadIdx.x;
    const Int start = (Int)blockIdx.x * STEPS, left = rows + count - start;
    const int steps = left < STEPS ? (int)left : STEPS;

    const auto store = [&](Int row, const Sum& sum) {
        Sum result = times(alpha, sum);
        if (y) {
            Sum before;
            for (int i = 0; i < PARTS; ++i) before.part[i] = read(y[row * y_step].part[i]);
            result = added(result, times(beta, before));
        }
#ifdef FINISHED
        result = FINISHED(row, result);
#endif
        for (int i = 0; i < PARTS; ++i) write(out[row * out_step].part[i], result.part[i]);
    };

    // The first row whose end is not before the block's first step is one of low, ..., high.
    Int low = 0, high = rows;
    while (high - low > THREADS) {
        const Int stride = (high - low + PROBES - 1) / PROBES, probe = low + (thread + 1) * stride - 1;
        const bool is_before = probe < high && (Int)offsets[probe + 1] - base + probe < start;
        low += __syncthreads_count(is_before) * stride;
        if (low + stride - 1 < high) high = low + stride - 1;
    }

    // Row ends from there on, until that of the block's last row; rows and elements are counted from `low` and `zero`.
    const Int zero = start - low;
    for (int from = 0, upto = (int)(high - low) + ahead, found = 0; !found && from < ENDS && low + from <= rows;) {
        if (upto > ENDS) upto = ENDS;
        for (int at = from + thread; at < upto && low + at <= rows; at += THREADS) {
            const int begin = clamp_far((Int)offsets[low + at] - base - zero);
            const int end = low + at < rows ? clamp_far((Int)offsets[low + at + 1] - base - zero) : FAR;
            storage.ends[at] = end;
            if (begin + at <= 0 && end + at >= 0) points[0] = {at, begin, end};
            if (begin + at <= steps && end + at >= steps) points[1] = {at, begin, end}, found = 1;
        }
        found = __syncthreads_count(found);
        from = upto;
        upto += THREADS;
    }
    const PathPoint first = points[0], last = points[1];
    // A short row is left to the block that it begins in; offsets that fall may not lead out of A or of shared memory.
    const bool is_begun = first.begin < -first.row, goes_on = last.begin < steps - last.row;
    const bool is_long = is_begun && first.end - first.begin > MAX_ROW;
    const bool stays_open = goes_on && last.end - last.begin > MAX_ROW;
    const int most = rows - low < ENDS ? (int)(rows - low) : ENDS;
    const int first_row = clamp(first.row + (is_begun && !is_long), 0, min(most, THREADS + 1));
    const int lines = clamp(last.row + (goes_on && !stays_open) - first_row, 0, min(most - first_row, CAPACITY));
    const int element = is_begun && !is_long ? first.end : -first.row;
    const Int from = zero + element, behind = from < 0 ? 0 : count - from;
    const int most_elements = behind < 0 ? 0 : behind < CAPACITY - lines ? (int)behind : CAPACITY - lines;
    const int elements = clamp((goes_on && !stays_open ? last.end : steps - last.row) - element, 0, most_elements);
    unsigned ticket = 0;
    if (!thread && !is_long && !stays_open) ticket = atomicInc(done, gridDim.x - 1);  // which makes it 0 again

    // Products, behind the row ends.
    Sum* const products = storage.sums + ((first_row + lines) * sizeof(int) + sizeof(Sum) - 1) / sizeof(Sum);
    const Number* const my_values = values + from;
    const PLACE* const my_columns = columns + from;
    PLACE place[ITEMS];
    Number value[ITEMS], other[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (const int at = i * THREADS + thread; at < elements) {
            place[i] = LOAD(my_columns + at);
            value[i] = loaded(my_values + at);
        }
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (i * THREADS + thread < elements) other[i] = x[((Int)place[i] - base) * X_STEP];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (const int at = i * THREADS + thread; at < elements) {
            Sum factor = as_sum(value[i]);
#if CONJ
            factor.part[1] = -factor.part[1];
#endif
            products[at] = times(factor, as_sum(other[i]));
        }
    if (!thread) is_last = !is_long && !stays_open && ticket == gridDim.x - 1;
    __syncthreads();

    // Each thread takes ITEMS of the block's steps, and remembers which of them end a row.
    const int* const my_ends = storage.ends + first_row;
    const int begin = min(thread * ITEMS, lines + elements);
    int row = max(0, begin - elements), highest = min(begin, lines);
    while (row < highest) {
        const int middle = (row + highest) / 2;
        if (my_ends[middle] - element + middle < begin) row = middle + 1; else highest = middle;
    }
    const int my_row = row;
    unsigned closed = 0;
    Sum taken[ITEMS], sum = {}, whole;
    int at = begin - row, end = row < lines ? my_ends[row] - element : FAR;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        taken[i] = {};
        if (end <= at) {
            closed |= 1u << i;
            ++row;
            end = row < lines ? my_ends[row] - element : FAR;
            sum = {};
        } else if (at < elements) {
            taken[i] = products[at++];
            sum = added(sum, taken[i]);
        }
    }
    sum = sum_before(closed != 0, sum, whole);
    // All have read: the sums of rows are put where products were, to be written in the order of memory.
    row = my_row;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (closed >> i & 1) storage.sums[row++] = sum, sum = {}; else sum = added(sum, taken[i]);
    __syncthreads();
    const bool closes = is_long && lines;
    for (int i = thread + closes; i < lines; i += THREADS) store(low + first_row + i, storage.sums[i]);

    if (is_long || stays_open) {
        if (!thread) {
            if (closes) long_rows[blockIdx.x] = low + first_row, heads[blockIdx.x] = storage.sums[0];
            if (stays_open) tails[blockIdx.x] = whole;
            states[blockIdx.x] = (closes ? CLOSES : 0) | (stays_open ? is_long && !lines ? INSIDE : OPENS : 0);
            *is_any = 1;
            __threadfence();
            is_last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
        }
        __syncthreads();
    }
    if (!is_last) return;
    __threadfence();
    if (!__ldcg(is_any)) return;

    // The long rows: a thread adds up what neighbouring blocks have left.
    const unsigned each = (gridDim.x + THREADS - 1) / THREADS;
    const unsigned begins = min(thread * each, gridDim.x), stops = min(begins + each, gridDim.x);
    bool is_new = false, has_ends = false;
    sum = {};
#pragma unroll 8
    for (unsigned block = begins; block < stops; ++block) {
        const unsigned state = __ldcg(states + block);
        const Sum tail = fetched(tails + block);
        if (!(state & INSIDE)) is_new = true, sum = {};
        if (state & (OPENS | INSIDE)) sum = added(sum, tail);
        if (state & CLOSES) has_ends = true;
    }
    sum = sum_before(is_new, sum, whole);
    for (unsigned block = begins; block < stops; ++block) {
        const unsigned state = __ldcg(states + block);
        if (has_ends) {
            if (state & CLOSES) store(__ldcg(long_rows + block), added(sum, fetched(heads + block)));
            if (!(state & INSIDE)) sum = {};
            if (state & (OPENS | INSIDE)) sum = added(sum, fetched(tails + block));
        }
        if (state) states[block] = 0;
    }
    if (!thread) *is_any = 0;
}
"""
)


def options(
    dtype: Dtype, result: Dtype, widths: tuple[int, int], tile: Tile, *, conj: bool, strided: bool
) -> tuple[str, ...]:
    """NVRTC's options: for the dtypes of A and y, the bytes of offsets and of columns, and how elements are read."""
    stored = REAL.get(dtype, dtype)
    words = {
        "STORED": NAMES[stored],
        "RESULT": NAMES[REAL.get(result, result)],
        "REAL": "double" if stored is F64 else "float",
        "PARTS": 2 if dtype.is_complex else 1,
        "BITS": BITS[dtype.itemsize],
        "LINE": INDICES[widths[0]],
        "PLACE": INDICES[widths[1]],
        "CONJ": int(conj and dtype.is_complex),
        "X_STEP": "x_step" if strided else "1",
        "THREADS": tile.threads,
        "ITEMS": tile.items,
        "MAX_ROW": tile.max_row,
        "BLOCKS": tile.blocks,
        "LOAD": tile.load,
    }
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())
