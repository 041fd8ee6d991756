"""The values of the product of two sparse matrices whose pattern is known, by a kernel of this library.

A group of lanes has a row of the product. It puts the row's columns into a table in shared memory, adds up the terms
there, element of A by element of A, so that sums have the same order in each run, and writes the row out: rows, columns
and values in one launch. A row that is too long for a table is the library's. Nobody has timed it against
cusparseSpGEMMreuse_compute on the GPU alone.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.libraries.cusolver.copies import check
from dispatch.libraries.nvrtc.kernel import loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import Sparse

__all__ = ["NAME", "SOURCE", "THREADS", "PatternProduct", "entries_of", "longest_row", "options"]

NAME, THREADS = "multiply_patterns", 256
WARP = 32
MOST_BYTES = 48 << 10  # of shared memory, for the tables of a block
MOST_OF_WARPS = 512  # entries of a table, beyond which a whole block has a row
TYPES = cusparse.cudaDataType
NUMBERS = {  # of a value type: the real type, and parts
    int(TYPES.CUDA_R_32F): ("float", 1),
    int(TYPES.CUDA_R_64F): ("double", 1),
    int(TYPES.CUDA_C_32F): ("float", 2),
    int(TYPES.CUDA_C_64F): ("double", 2),
}
REAL_BYTES = {"float": 4, "double": 8}
KEY_BYTES = 4

SOURCE = r"""
typedef REAL Real;
struct alignas(sizeof(Real) * PARTS) Number { Real part[PARTS]; };
const int EMPTY = -1;

#if GROUP == 32
__device__ void meet() { __syncwarp(); }
#else
__device__ void meet() { __syncthreads(); }
#endif

// Where a column is in a table, or the empty entry at which it is to be.
__device__ unsigned entry_of(const int* keys, unsigned mask, int column)
{
    unsigned at = (unsigned)column * 2654435769u >> 16 & mask;
    while (true) {
        const int key = *(const volatile int*)(keys + at);
        if (key == column || key == EMPTY) return at;
        at = at + 1 & mask;
    }
}

__device__ void put(int* keys, unsigned mask, int column)
{
    unsigned at = entry_of(keys, mask, column);
    while (true) {
        const int key = atomicCAS(keys + at, EMPTY, column);
        if (key == EMPTY || key == column) return;
        at = at + 1 & mask;
    }
}

__device__ Number product(const Number& x, const Number& y)
{
#if PARTS == 2
    return {{x.part[0] * y.part[0] - x.part[1] * y.part[1], x.part[0] * y.part[1] + x.part[1] * y.part[0]}};
#else
    return {{x.part[0] * y.part[0]}};
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) multiply_patterns(
    const Number* a_values, const int* a_rows, const int* a_columns,
    const Number* b_values, const int* b_rows, const int* b_columns,
    Number* out_values, int* out_rows, int* out_columns, const int* known_rows, const int* known_columns,
    Number alpha, int lines, unsigned entries)
{
    extern __shared__ double memory[];
    const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP, groups = THREADS / GROUP;
    Number* sums = (Number*)memory + group * entries;
    int* keys = (int*)((Number*)memory + groups * entries) + group * entries;
    const int line = blockIdx.x * groups + group;
    if (line >= lines) return;  // a whole group, and where that is a block the whole block
    const int begin = known_rows[line], end = known_rows[line + 1];
    if (lane == 0) {
        out_rows[line] = begin;
        if (line == lines - 1) out_rows[lines] = end;
    }
    unsigned mask = 7;  // a table of the row's own size is emptied sooner
    while (mask < entries - 1 && mask + 1 < 2u * (end - begin)) mask = 2 * mask + 1;
    for (unsigned at = lane; at <= mask; at += GROUP) {
        keys[at] = EMPTY;
        sums[at] = {};
    }
    meet();
    for (int at = begin + lane; at < end; at += GROUP) put(keys, mask, known_columns[at]);
    meet();
    const int last = a_rows[line + 1];
    for (int first = a_rows[line]; first < last; first += 32) {
        // Each lane of a warp looks one element up for all of them.
        const int own = first + threadIdx.x % 32;
        int b_begin = 0, b_end = 0;
        Number factor = {};
        if (own < last) {
            const int row = a_columns[own];
            b_begin = b_rows[row], b_end = b_rows[row + 1], factor = a_values[own];
        }
        for (int turn = 0; turn < 32 && first + turn < last; ++turn) {
            const int from = __shfl_sync(0xffffffffu, b_begin, turn), to = __shfl_sync(0xffffffffu, b_end, turn);
            Number x;
            for (int part = 0; part < PARTS; ++part) x.part[part] = __shfl_sync(0xffffffffu, factor.part[part], turn);
            for (int at = from + lane; at < to; at += GROUP) {
                const int column = b_columns[at];
                const Number term = product(x, b_values[at]);
                const unsigned entry = entry_of(keys, mask, column);
                if (keys[entry] != column) continue;  // another pattern than was promised
                for (int part = 0; part < PARTS; ++part) atomicAdd(&sums[entry].part[part], term.part[part]);
            }
            meet();
        }
    }
    for (int at = begin + lane; at < end; at += GROUP) {
        const int column = known_columns[at];
        out_columns[at] = column;
        out_values[at] = product(alpha, sums[entry_of(keys, mask, column)]);
    }
}
"""


def options(value_type: int, group: int) -> tuple[str, ...]:
    """NVRTC's options for elements of a type, and for so many lanes that have a row."""
    real, parts = NUMBERS[value_type]
    words = {"REAL": real, "PARTS": parts, "GROUP": group, "THREADS": THREADS}
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())


def entries_of(longest: int, value_type: int) -> tuple[int, int] | None:
    """The entries of a table for rows of so many elements, and the lanes that have a row; None where none fits."""
    real, parts = NUMBERS[value_type]
    entry_bytes, entries = REAL_BYTES[real] * parts + KEY_BYTES, 8
    while 3 * entries < 4 * longest:  # at least a quarter stays empty, so that each search ends soon
        entries *= 2
    group = WARP if entries <= MOST_OF_WARPS else THREADS
    if group == WARP and entries * entry_bytes * (THREADS // WARP) > MOST_BYTES:
        group = THREADS
    return (entries, group) if entries * entry_bytes * (THREADS // group) <= MOST_BYTES else None


def longest_row(executor: CudaExecutor, rows: int, lines: int) -> int:
    """The elements of the longest row, by i32 offsets in device memory, which the host waits for."""
    ends = np.empty(lines + 1, np.int32)
    stream = executor.target.value
    driver.cuMemcpyDtoHAsync(ends.ctypes.data, rows, ends.nbytes, stream)
    driver.cuStreamSynchronize(stream)
    return int(np.diff(ends).max(initial=0))


class PatternProduct:
    """The launch for two matrices in CSR, whose indices are i32 and begin at 0, and the known pattern of their product.

    `front` are the two matrices, `said` the product, whose pattern is at the addresses `rows` and `columns`.
    """

    __slots__ = ("_executor", "_given", "_launch", "_places")

    def __init__(
        self, executor: CudaExecutor, front: tuple[Sparse, Sparse], said: Sparse, alpha: complex,
        pattern: tuple[int, int], sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        """`sizes` are what `entries_of` says."""
        self._executor, (entries, group) = executor, sizes
        real, parts = NUMBERS[said.value_type]
        lines, groups = said.shape[0], THREADS // group
        self._places = [place for one in (*front, said) for place in (one.values, one.rows, one.columns)]
        kind: Any = ctypes.c_double if real == "double" else ctypes.c_float
        factor = (kind * parts)(*(alpha.real, alpha.imag)[:parts])
        addresses = (*(ctypes.c_void_p() for _ in self._places), *map(ctypes.c_void_p, pattern))
        self._given = (*addresses, factor, ctypes.c_int(lines), ctypes.c_uint(entries))
        pointers = (ctypes.c_void_p * len(self._given))(*map(ctypes.addressof, self._given))
        function = loaded(SOURCE, NAME, options(said.value_type, group), executor.device)
        shared = entries * groups * (REAL_BYTES[real] * parts + KEY_BYTES)
        fixed = (ctypes.c_void_p(function), -(-lines // groups), 1, 1, THREADS, 1, 1, shared, executor.target)
        self._launch = partial(driver.cuLaunchKernel.unchecked, *fixed, pointers, None)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Write rows, columns and values for the operands at some addresses."""
        for slot, place in zip(self._given, self._places, strict=False):
            slot.value = addresses[place] or None
        check(self._executor, self._launch())
