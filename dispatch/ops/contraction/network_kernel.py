"""A kernel that contracts a whole network of small tensors in one block of threads. Its work between two barriers is a
round, in which each warp does its part of a step.

The steps, and the locations of their operands, are words in memory, which network.py writes. So one kernel per dtype is
compiled once for all networks, whatever their shapes. All operands are copied first, by concurrent copies:
waiting for the GPU's memory before each step would take longer than the steps do. Copies and intermediate results
are in shared memory, or if that is too small in the plan's memory. A copy has the modes of a batch first, then those
that are summed over, then those that the other operand does not have: neighbouring threads read neighbouring elements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.keys import BF16, C64, C128, F16, F32, F64
from dispatch.libraries.nvrtc.number_types import NUMBERS

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["KINDS", "MAX_THREADS", "NAME", "POINTERS", "SOURCE", "options"]

NAME = "contract_network"
POINTERS = 64  # operands and the result; a kernel takes 4 KB of parameters at most
MAX_THREADS = 512  # of a block; each thread may have 128 registers
KINDS = {F16: 0, BF16: 1, F32: 2, F64: 3, C64: 4, C128: 5}

SOURCE = (
    NUMBERS
    + r"""
#define HALF 0
#define BRAIN 1
#define SINGLE 2
#define DOUBLE 3
#define SINGLES 4
#define DOUBLES 5
struct alignas(sizeof(REAL) * PARTS) Number { REAL part[PARTS]; };
struct Pointers { void* at[POINTERS]; };
// One or several axes of an array, the fastest first: how often it steps, and by how many elements.
struct alignas(16) Axis { unsigned extent, magic; int shift, stride; };
struct alignas(16) Header { int rounds, chunks, chunks_at, schedule_at, zeros_at, slot, unused, unused_too; };
struct alignas(16) Copy { int slot, kind, conjugated, first, count, to, axes, unused; };
struct alignas(16) Step {
    int a, b, out, items;
    int a_batch, a_term, b_batch, b_term;
    int rows, columns, terms, tile;
    unsigned row_tiles, row_magic; int row_shift, split;
    unsigned column_tiles, column_magic; int column_shift, first_warp;
    int warps, column_axes, row_axes, batch_axes;  // of where the result goes, one behind another
};

// The quotient of a number below 2^31 by one whose reciprocal is given; a magic of 0 stands for 1.
__device__ unsigned quotient(unsigned x, unsigned magic, int shift)
{
    return magic ? __umulhi(x, magic) >> shift : x;
}

__device__ int place_of(unsigned x, const Axis* axes, int count)
{
    int at = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const Axis axis = axes[i];
        const unsigned rest = quotient(x, axis.magic, axis.shift);
        at += (int)(x - rest * axis.extent) * axis.stride;
        x = rest;
    }
    return at;
}

// What an operand has, as it is: it becomes a number once others are on their way, too.
union Raw { unsigned short half; float single; double whole; Number number; };

__device__ Raw read_raw(const void* from, long long at, int kind)
{
    Raw x;
#if KIND == HALF || KIND == BRAIN
    x.half = ((const unsigned short*)from)[at];
#elif KIND == SINGLE
    if (kind == SINGLE) x.single = ((const float*)from)[at];
    else x.half = ((const unsigned short*)from)[at];
#elif KIND == DOUBLE
    if (kind == DOUBLE) x.whole = ((const double*)from)[at];
    else if (kind == SINGLE) x.single = ((const float*)from)[at];
    else x.half = ((const unsigned short*)from)[at];
#elif KIND == SINGLES
    x.number = ((const Number*)from)[at];
#else
    if (kind == DOUBLES) x.number = ((const Number*)from)[at];
    else if (kind == SINGLES || kind == DOUBLE) x.whole = ((const double*)from)[at];
    else if (kind == SINGLE) x.single = ((const float*)from)[at];
    else x.half = ((const unsigned short*)from)[at];
#endif
    return x;
}

__device__ Number number_of(Raw x, int kind, int conjugated)
{
    Number y;
#if KIND == HALF
    y.part[0] = read(Half{x.half});
#elif KIND == BRAIN
    y.part[0] = read(Brain{x.half});
#elif KIND == SINGLE
    y.part[0] = kind == SINGLE ? x.single : read(Half{x.half});
#elif KIND == DOUBLE
    y.part[0] = kind == DOUBLE ? x.whole : kind == SINGLE ? (double)x.single : (double)read(Half{x.half});
#elif KIND == SINGLES
    y = x.number;
#else
    if (kind == DOUBLES) y = x.number;
    else if (kind == SINGLES) {
        union { double whole; float part[2]; } pair;
        pair.whole = x.whole;
        y.part[0] = pair.part[0];
        y.part[1] = pair.part[1];
    } else {
        y.part[0] = kind == DOUBLE ? x.whole : kind == SINGLE ? (double)x.single : (double)read(Half{x.half});
        y.part[1] = 0;
    }
#endif
#if PARTS == 2
    if (conjugated) y.part[1] = -y.part[1];
#endif
    return y;
}

__device__ void give(void* result, long long at, Number x)
{
#if KIND == HALF
    write(((Half*)result)[at], x.part[0]);
#elif KIND == BRAIN
    write(((Brain*)result)[at], x.part[0]);
#else
    ((Number*)result)[at] = x;
#endif
}

__device__ void add(Number& sum, Number x)
{
    for (int i = 0; i < PARTS; ++i) sum.part[i] += x.part[i];
}

__device__ void add_product(Number& sum, Number x, Number y)
{
    sum.part[0] = fma(x.part[0], y.part[0], sum.part[0]);
#if PARTS == 2
    sum.part[0] = fma(-x.part[1], y.part[1], sum.part[0]);
    sum.part[1] = fma(x.part[0], y.part[1], sum.part[1]);
    sum.part[1] = fma(x.part[1], y.part[0], sum.part[1]);
#endif
}

// A step by some warps: each thread has ROWS x COLUMNS elements of the result, which lie apart so that neighbours read
// neighbours. Where there are few elements 2^split lanes share the terms of one.
template <int ROWS, int COLUMNS>
__device__ void carry_out(const Step& step, Number* arrays, void* result, int warp, int lane)
{
    const Axis* const of_columns = (const Axis*)(&step + 1);
    const Axis* const of_rows = of_columns + step.column_axes;
    const Axis* const of_batch = of_rows + step.row_axes;
    const int split = ROWS * COLUMNS == 1 ? step.split : 0, wide = 5 - split;
    const int part = lane >> wide, own = lane & ((1 << wide) - 1), parts = 1 << split;
    for (int first = (warp - step.first_warp) << wide; first < step.items; first += step.warps << wide) {
        const bool is_there = first + own < step.items;
        const unsigned item = is_there ? first + own : 0;
        const unsigned line = quotient(item, step.column_magic, step.column_shift);
        const unsigned batch = quotient(line, step.row_magic, step.row_shift);
        const int row = line - batch * step.row_tiles, column = item - line * step.column_tiles;
        const Number* a = arrays + step.a + batch * step.a_batch + part * step.a_term;
        const Number* b = arrays + step.b + batch * step.b_batch + part * step.b_term;
        int in_a[ROWS], in_b[COLUMNS];
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const int at = row + i * (int)step.row_tiles;
            in_a[i] = at < step.rows ? at : 0;
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int at = column + j * (int)step.column_tiles;
            in_b[j] = at < step.columns ? at : 0;
        }
        Number sum[ROWS][COLUMNS] = {};
        if (ROWS * COLUMNS == 1 && step.b < 0) {
#pragma unroll 4
            for (int term = part; term < step.terms; term += parts) {
                add(sum[0][0], a[in_a[0]]);
                a += step.a_term << split;
            }
        } else {
#pragma unroll (ROWS * COLUMNS == 1 ? 4 : 2)
            for (int term = part; term < step.terms; term += parts) {
                Number x[ROWS], y[COLUMNS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) x[i] = a[in_a[i]];
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) y[j] = b[in_b[j]];
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) add_product(sum[i][j], x[i], y[j]);
                a += step.a_term << split;
                b += step.b_term << split;
            }
        }
        if (ROWS * COLUMNS == 1)
            for (int by = 16; by >= 1 << wide; by >>= 1) {
                Number theirs;
#pragma unroll
                for (int i = 0; i < PARTS; ++i) theirs.part[i] = __shfl_down_sync(~0u, sum[0][0].part[i], by, 32);
                add(sum[0][0], theirs);
            }
        const int begin = place_of(batch, of_batch, step.batch_axes);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) in_a[i] = begin + place_of(in_a[i], of_rows, step.row_axes);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) in_b[j] = place_of(in_b[j], of_columns, step.column_axes);
        if (!is_there || part) continue;
        const int rows = step.rows - row, columns = step.columns - column;  // of which the tile has every n-th
        if (step.out >= 0) {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (i * (int)step.row_tiles < rows && j * (int)step.column_tiles < columns)
                        arrays[step.out + in_a[i] + in_b[j]] = sum[i][j];
        } else {
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j)
                    if (i * (int)step.row_tiles < rows && j * (int)step.column_tiles < columns)
                        give(result, in_a[i] + in_b[j], sum[i][j]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1)
contract_network(const __grid_constant__ Pointers pointers, const Axis* program, int quads, Number* apart)
{
    extern __shared__ Axis memory[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int i = threadIdx.x; i < quads; i += blockDim.x) memory[i] = program[i];
    __syncthreads();
#if IN_SHARED
    Number* const arrays = (Number*)(memory + quads);
#else
    Number* const arrays = apart;
#endif
    const int* const words = (const int*)memory;
    const Header& header = *(const Header*)words;
    void* const result = pointers.at[header.slot];
    const unsigned short* const copies = (const unsigned short*)(words + header.chunks_at);

    for (int first = warp; first < header.chunks; first += warps * COPIES) {
        Raw x[COPIES];
        int to[COPIES];
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int chunk = first + i * warps;
            to[i] = -1;
            if (chunk >= header.chunks) continue;
            const Copy& copy = *(const Copy*)(words + 4 * copies[chunk]);
            const int element = (chunk - copy.first) * 32 + lane;
            if (element >= copy.count) continue;
            to[i] = copy.to + element;
            x[i] = read_raw(pointers.at[copy.slot], place_of(element, (const Axis*)(&copy + 1), copy.axes), copy.kind);
        }
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            if (to[i] < 0) continue;
            const Copy& copy = *(const Copy*)(words + 4 * copies[first + i * warps]);
            arrays[to[i]] = number_of(x[i], copy.kind, copy.conjugated);
        }
    }
    if (header.zeros_at) {
        const Copy& zeros = *(const Copy*)(words + header.zeros_at);
        for (int i = threadIdx.x; i < zeros.count; i += blockDim.x)
            give(result, place_of(i, (const Axis*)(&zeros + 1), zeros.axes), Number{});
    }
    __syncthreads();

    for (int round = 0; round < header.rounds; ++round) {
        const int at = words[header.schedule_at + round * warps + warp];
        if (at) {
            const Step& step = *(const Step*)(words + at);
            if (step.tile == 0) carry_out<1, 1>(step, arrays, result, warp, lane);
            else if (step.tile == 1) carry_out<1, 4>(step, arrays, result, warp, lane);
            else if (step.tile == 2) carry_out<2, 2>(step, arrays, result, warp, lane);
#if KIND != DOUBLES
            else carry_out<4, 4>(step, arrays, result, warp, lane);
#endif
        }
        __syncthreads();
    }
}
"""
)


def options(dtype: Dtype, *, in_shared: bool) -> tuple[str, ...]:
    """NVRTC's options, except the architecture, for results of a dtype."""
    is_double = dtype in (F64, C128)
    macros = {
        "KIND": KINDS[dtype],
        "REAL": "double" if is_double else "float",
        "PARTS": 2 if dtype.is_complex else 1,
        "IN_SHARED": int(in_shared),
        "POINTERS": POINTERS,
        "MAX_THREADS": MAX_THREADS,
        "COPIES": 8,
    }
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in macros.items()))
