"""Kernels between CSR and BSR, in CUDA C++: they find the blocks that have an element, fill them, and spread them out.

A block is represented by its first element: that of the topmost row that has an element in the block. Each element
determines by bisection of the rows above it, within the same row of blocks, whether it is the first of its block, so
that threads do equal work however long rows are. First elements are marked by bits, 32 in a word, and a scan of the
counts of words gives the number of blocks that begin before any element. The place of a block in its row of blocks is
the number of first elements, in all of these rows, in earlier columns: bisection again. To fill the blocks, a thread
searches its row of the matrix for one block column. Memory is written once, along the blocks, including zeros, and
duplicate elements are added up in a fixed order.

All of this needs sorted rows: `mark_blocks` counts the elements that precede a smaller column, and `tell_count` writes
minus that number in place of the number of blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS
from dispatch.ops.sparse.compression_kernels import CHUNK, SCAN, THREADS

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["SOURCE", "WORD", "options"]

WORD = 32  # elements per word of bits
REAL = {C64: F32, C128: F64}
INDICES = {4: "int", 8: "long long"}  # by size in bytes

SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;
struct alignas(sizeof(STORED) * PARTS) Number { STORED part[PARTS]; };
"""
    + SCAN
    + r"""
// Division of 64 bits takes several times as long as one of 32.
__device__ Int quotient(Int x, Int y) { return (x | y) >> 32 ? x / y : (unsigned)x / (unsigned)y; }

// The line that an element is in: the first one that ends behind it.
__device__ Int line_of(const OFFSET* ends, Int lines, Int base, Int element)
{
    Int low = 0, high = lines - 1;
    while (low < high) {
        const Int middle = (low + high) / 2;
        if ((Int)ends[middle + 1] - base <= element) low = middle + 1; else high = middle;
    }
    return low;
}

// The first element of a sorted row that is in this column, or behind it; `end` where there is none.
__device__ Int from_column(const INDEX* columns, Int begin, Int end, Int column)
{
    while (begin < end) {
        const Int middle = (begin + end) / 2;
        if ((Int)columns[middle] < column) begin = middle + 1; else end = middle;
    }
    return begin;
}

// How many elements before this one are the first of their block.
__device__ Int blocks_before(const unsigned* bits, const Int* counts, const Int* sums, Int element)
{
    const Int word = element / 32;
    return counts[word] + sums[word / CHUNK] + __popc(bits[word] & ((1u << element % 32) - 1));
}

// `bits` has a word more than `count` elements fill, so that there is one behind the last.
extern "C" __global__ void mark_blocks(
    const OFFSET* rows, const INDEX* columns, unsigned* bits, Int* counts, unsigned long long* unsorted,
    Int count, Int m, Int base, Int high, Int wide)
{
    const Int mine = (Int)blockIdx.x * THREADS + threadIdx.x;
    bool is_first = mine < count;
    if (is_first) {
        const Int row = line_of(rows, m, base, mine), column = (Int)columns[mine] - base;
        const Int block = quotient(column, wide);
        if (mine > (Int)rows[row] - base) {
            const Int before = (Int)columns[mine - 1] - base;
            if (before > column) atomicAdd(unsorted, 1ull);
            is_first = quotient(before, wide) != block;
        }
        for (Int above = quotient(row, high) * high; is_first && above < row; ++above) {
            const Int end = (Int)rows[above + 1] - base;
            const Int found = from_column(columns, (Int)rows[above] - base, end, block * wide + base);
            is_first = found >= end || quotient((Int)columns[found] - base, wide) != block;
        }
    }
    const unsigned all = __ballot_sync(0xffffffffu, is_first);
    if (threadIdx.x % 32 == 0 && mine <= count) {
        bits[mine / 32] = all;
        counts[mine / 32] = __popc(all);
    }
}

extern "C" __global__ void tell_count(const unsigned long long* unsorted, Int* total)
{
    if (blockIdx.x == 0 && threadIdx.x == 0 && *unsorted) *total = -(Int)*unsorted;
}

extern "C" __global__ void place_blocks(
    const OFFSET* rows, const INDEX* columns, const unsigned* bits, const Int* counts, const Int* sums,
    OFFSET* out_rows, INDEX* out_columns, Int count, Int m, Int base, Int high, Int wide)
{
    const Int mine = (Int)blockIdx.x * THREADS + threadIdx.x;
    if (mine * high <= m) {
        const Int begun = blocks_before(bits, counts, sums, (Int)rows[mine * high] - base);
        out_rows[mine] = (OFFSET)(begun + base);
    }
    if (mine >= count || !(bits[mine / 32] >> mine % 32 & 1)) return;
    const Int block = quotient((Int)columns[mine] - base, wide);
    const Int row = quotient(line_of(rows, m, base, mine), high) * high;  // the first one of the row of blocks
    Int place = blocks_before(bits, counts, sums, (Int)rows[row] - base);
    for (Int i = row; i < row + high; ++i) {
        const Int begin = (Int)rows[i] - base, end = (Int)rows[i + 1] - base;
        const Int found = from_column(columns, begin, end, block * wide + base);
        place += blocks_before(bits, counts, sums, found) - blocks_before(bits, counts, sums, begin);
    }
    out_columns[place] = (INDEX)(block + base);
}

extern "C" __global__ void fill_blocks(
    const Number* held, const OFFSET* rows, const INDEX* columns, Number* out, const OFFSET* out_rows,
    const INDEX* out_columns, Int blocks, Int lines, Int base, Int high, Int wide)
{
    const Int mine = (Int)blockIdx.x * THREADS + threadIdx.x;
    if (mine >= blocks * high * wide) return;
    const Int line = quotient(mine, wide), block = quotient(line, high);  // that of all blocks' lines, and the block
    const Int row = line_of(out_rows, lines, base, block) * high + line - block * high;
    const Int column = ((Int)out_columns[block] - base) * wide + mine - line * wide + base;
    const Int end = (Int)rows[row + 1] - base;
    const Int at = from_column(columns, (Int)rows[row] - base, end, column);
    Number found = {};
    if (at < end && (Int)columns[at] == column) found = held[at];
    if (at + 1 < end && (Int)columns[at + 1] == column)  // elements of one place add up
        for (int part = 0; part < PARTS; ++part) {
            REAL sum = read(found.part[part]);
            for (Int i = at + 1; i < end && (Int)columns[i] == column; ++i) sum += read(held[i].part[part]);
            write(found.part[part], sum);
        }
    out[mine] = found;
}

extern "C" __global__ void expand_blocks(
    const Number* held, const OFFSET* rows, const INDEX* columns, Number* out, OFFSET* out_rows, INDEX* out_columns,
    Int blocks, Int lines, Int base, Int high, Int wide)
{
    const Int mine = (Int)blockIdx.x * THREADS + threadIdx.x;
    if (mine <= lines * high) {
        const Int line = quotient(mine, high), begin = (Int)rows[line] - base;
        const Int across = line < lines ? (Int)rows[line + 1] - base - begin : 0;
        out_rows[mine] = (OFFSET)((begin * high + (mine - line * high) * across) * wide + base);
    }
    if (mine >= blocks * high * wide) return;
    const Int line = line_of(rows, lines, base, quotient(mine, high * wide)), begin = (Int)rows[line] - base;
    const Int across = ((Int)rows[line + 1] - base - begin) * wide, inside = mine - begin * high * wide;
    const Int row = quotient(inside, across), place = inside - row * across;  // of the row of blocks, and of this row
    const Int number = quotient(place, wide), column = place - number * wide;  // of its blocks, and of this block
    out[mine] = held[((begin + number) * high + row) * wide + column];
    out_columns[mine] = (INDEX)(((Int)columns[begin + number] - base) * wide + column + base);
}

extern "C" __global__ void unpack_blocks(
    const Number* held, const OFFSET* rows, const INDEX* columns, Number* out, Int blocks, Int lines, Int base,
    Int high, Int wide, Int row_step, Int column_step)
{
    const Int mine = (Int)blockIdx.x * THREADS + threadIdx.x;
    if (mine >= blocks * high * wide) return;
    const Int line = quotient(mine, wide), block = quotient(line, high);
    const Int row = line_of(rows, lines, base, block) * high + line - block * high;
    const Int column = ((Int)columns[block] - base) * wide + mine - line * wide;
    out[row * row_step + column * column_step] = held[mine];
}
"""
)


def options(dtype: Dtype, offset_bytes: int, index_bytes: int) -> tuple[str, ...]:
    """NVRTC's options for a dtype of elements, and for offsets and indices of so many bytes."""
    stored = REAL.get(dtype, dtype)
    words = {
        "STORED": NAMES[stored],
        "REAL": "double" if stored is F64 else "float",
        "PARTS": 2 if dtype.is_complex else 1,
        "OFFSET": INDICES[offset_bytes],
        "INDEX": INDICES[index_bytes],
        "THREADS": THREADS,
        "CHUNK": CHUNK,
    }
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())
