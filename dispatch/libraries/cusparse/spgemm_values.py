"""The values of the product of two sparse matrices with a known pattern, by kernels of this library.

For a known pattern, the terms of each of its elements are listed: a group of lanes processes a row of the product, puts
its columns into a hash table in shared memory, and goes through the elements of A in order, so that the terms of a sum
are listed in the same order each time. If a row is too long for a table, the library computes the product. From then
on a product is one launch that adds up the listed terms and writes rows, columns and values.

On an H200 cusparseSpGEMMreuse_compute of 12.6 took 64 us in six kernels and copies for 3.4 million elements of 6.7
million terms in f32, and a kernel that filled such a table in each call took 166 us.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.errors import Refused
from dispatch.libraries.cusolver.copies import check
from dispatch.libraries.nvrtc.kernel import loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import SparseSpec

__all__ = ["ADD", "LIST", "SOURCE", "THREADS", "PatternProduct", "entries_of", "lanes_of", "longest_row", "options"]

LIST, ADD, THREADS = "list_terms", "add_terms", 256
WARP = 32
MAX_BYTES = 48 << 10  # of shared memory, for the tables of a block
MAX_WARP_TABLE = 512  # entries of a table; for larger ones a whole block processes a row
ENTRY_BYTES, TERM_BYTES, INT_BYTES = 8, 8, 4
MAX_TERMS = 2**31 - 1
IN_FLIGHT = 132 * 2048  # threads, approximately
WAVE, STEP = 1.0, 0.05  # the time of so many threads, and of an iteration of a lane's loop, in arbitrary units
TYPES = cusparse.cudaDataType
NUMBERS = {  # for a value type: the real type, and the number of parts
    int(TYPES.CUDA_R_32F): ("float", 1),
    int(TYPES.CUDA_R_64F): ("double", 1),
    int(TYPES.CUDA_C_32F): ("float", 2),
    int(TYPES.CUDA_C_64F): ("double", 2),
}

SOURCE = r"""
typedef REAL Real;
struct alignas(sizeof(Real) * PARTS) Number { Real part[PARTS]; };
struct alignas(8) Term { int a, b; };
const int EMPTY = -1;

#if GROUP == 32
__device__ void sync_group() { __syncwarp(); }
#else
__device__ void sync_group() { __syncthreads(); }
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

__device__ void insert(int* keys, unsigned mask, int column)
{
    unsigned at = entry_of(keys, mask, column);
    while (true) {
        const int key = atomicCAS(keys + at, EMPTY, column);
        if (key == EMPTY || key == column) return;
        at = at + 1 & mask;
    }
}

// Without `terms` it counts those of each element into `starts`; with them it lists them from where `starts` says.
extern "C" __global__ void __launch_bounds__(THREADS, 1) list_terms(
    const int* a_rows, const int* a_columns, const int* b_rows, const int* b_columns,
    const int* known_rows, const int* known_columns, int* starts, Term* terms, int lines, unsigned entries)
{
    extern __shared__ int memory[];
    const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP, groups = THREADS / GROUP;
    int* keys = memory + group * entries;
    int* next = memory + groups * entries + group * entries;
    const int line = blockIdx.x * groups + group;
    if (line >= lines) return;  // a whole group, and where that is a block the whole block
    const int begin = known_rows[line], end = known_rows[line + 1];
    unsigned mask = 7;  // a table of the row's own size is emptied sooner
    while (mask < entries - 1 && mask + 1 < 2u * (end - begin)) mask = 2 * mask + 1;
    for (unsigned at = lane; at <= mask; at += GROUP) {
        keys[at] = EMPTY;
        next[at] = 0;
    }
    sync_group();
    for (int at = begin + lane; at < end; at += GROUP) insert(keys, mask, known_columns[at]);
    sync_group();
    if (terms)
        for (int at = begin + lane; at < end; at += GROUP) next[entry_of(keys, mask, known_columns[at])] = starts[at];
    sync_group();
    const int last = a_rows[line + 1];
    for (int own = a_rows[line]; own < last; ++own) {
        const int row = a_columns[own], b_end = b_rows[row + 1];
        for (int at = b_rows[row] + lane; at < b_end; at += GROUP) {
            const int column = b_columns[at];
            const unsigned entry = entry_of(keys, mask, column);
            if (keys[entry] != column) continue;  // another pattern than was promised
            const int spot = atomicAdd(&next[entry], 1);
            if (terms) terms[spot] = {own, at};
        }
        sync_group();
    }
    if (!terms)
        for (int at = begin + lane; at < end; at += GROUP) starts[at] = next[entry_of(keys, mask, known_columns[at])];
}

__device__ void add_product(Number& sum, const Number& x, const Number& y)
{
    sum.part[0] = fma(x.part[0], y.part[0], sum.part[0]);
#if PARTS == 2
    sum.part[0] = fma(-x.part[1], y.part[1], sum.part[0]);
    sum.part[1] = fma(x.part[0], y.part[1], fma(x.part[1], y.part[0], sum.part[1]));
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) add_terms(
    const Number* a_values, const Number* b_values, Number* out_values, int* out_rows, int* out_columns,
    const int* known_rows, const int* known_columns, const int* starts, const Term* terms,
    Number alpha, int lines, int count)
{
    const long long mine = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (mine <= lines) out_rows[mine] = known_rows[mine];
    const long long element = mine / LANES;
    const int lane = threadIdx.x % LANES;
    Number sum = {};
    if (element < count) {
        const int end = starts[element + 1];
#pragma unroll 4
        for (int at = starts[element] + lane; at < end; at += LANES)
            add_product(sum, a_values[terms[at].a], b_values[terms[at].b]);
    }
    for (int part = 0; part < PARTS; ++part)
        for (int lanes = LANES / 2; lanes; lanes /= 2)
            sum.part[part] += __shfl_xor_sync(0xffffffffu, sum.part[part], lanes);
    if (lane || element >= count) return;
    Number scaled = {};
    add_product(scaled, alpha, sum);
    out_values[element] = scaled;
    out_columns[element] = known_columns[element];
}
"""


def options(value_type: int, group: int, lanes: int) -> tuple[str, ...]:
    """NVRTC's options for a dtype of elements, the lanes that list the terms of a row, and those that add up a sum."""
    real, parts = NUMBERS[value_type]
    words = {"REAL": real, "PARTS": parts, "GROUP": group, "LANES": lanes, "THREADS": THREADS}
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())


def entries_of(longest: int) -> tuple[int, int] | None:
    """The entries of a table for rows of so many elements, and the lanes for a row; None for rows that are too long."""
    entries = 8
    while 3 * entries < 4 * longest:  # at least a quarter stays empty, so that each search ends soon
        entries *= 2
    group = WARP if entries <= MAX_WARP_TABLE else THREADS
    return (entries, group) if entries * ENTRY_BYTES * (THREADS // group) <= MAX_BYTES else None


def lanes_of(count: int, longest: int) -> int:
    """The number of lanes that add up one sum, for so many sums and a longest one of so many terms; by an estimate."""
    return min((1, 2, 4, 8, 16, 32), key=lambda lanes: WAVE * count * lanes / IN_FLIGHT + STEP * longest / lanes)


def longest_row(executor: CudaExecutor, rows: int, lines: int) -> int:
    """The number of elements of the longest row, from i32 offsets in device memory; waits for them."""
    return int(np.diff(read_i32(executor, rows, lines + 1)).max(initial=0))


def read_i32(executor: CudaExecutor, address: int, count: int) -> np.ndarray:
    """So many i32 from a device address; waits for the stream."""
    values, stream = np.empty(count, np.int32), executor.target.value
    driver.cuMemcpyDtoHAsync(values.ctypes.data, address, values.nbytes, stream)
    driver.cuStreamSynchronize(stream)
    return values


class PatternProduct:
    """The launch for two matrices in CSR, whose indices are i32 and begin at 0, and the known pattern of their product.

    `front` are the two matrices, `spec` is the product, whose pattern is at the two addresses `pattern`. The
    constructor lists the terms, which waits for the device; after that the indices of the two matrices are not read.
    """

    __slots__ = ("_executor", "_given", "_launch", "_lists", "_places")

    def __init__(
        self, executor: CudaExecutor, front: tuple[SparseSpec, SparseSpec], spec: SparseSpec, alpha: complex,
        pattern: tuple[int, int], indices: Sequence[int], sizes: tuple[int, int],
    ) -> None:  # fmt: skip
        """`indices` are the addresses of rows and columns of both, `sizes` is the result of `entries_of`.

        Refused if there are more terms than an index can number, or if NVRTC is missing.
        """
        self._executor, group = executor, sizes[1]
        starts, counts = self._count_terms(spec, pattern, indices, sizes)
        count, lines = int(counts[-1]), spec.shape[0]
        if count > MAX_TERMS:
            raise Refused(f"a product of {count} terms, more than {MAX_TERMS}")
        lanes = lanes_of(spec.nnz, int(np.diff(counts).max(initial=0)))
        terms = self._allocate(count * TERM_BYTES)
        numbered = counts.astype(np.int32)
        driver.cuMemcpyHtoDAsync(starts.base, numbered.ctypes.data, numbered.nbytes, executor.target.value)
        self._list_terms(spec, pattern, indices, sizes, (starts.base, terms.base))
        driver.cuStreamSynchronize(executor.target.value)  # until then the kernel reads `numbered`
        self._lists = starts, terms
        self._places = (*(one.values for one in front), spec.values, spec.rows, spec.columns)
        real, parts = NUMBERS[spec.value_type]
        kind: Any = ctypes.c_double if real == "double" else ctypes.c_float
        factor = (kind * parts)(*(alpha.real, alpha.imag)[:parts])
        slots = (ctypes.c_void_p() for _ in self._places)
        fixed = map(ctypes.c_void_p, (*pattern, starts.base, terms.base))
        self._given = (*slots, *fixed, factor, ctypes.c_int(lines), ctypes.c_int(spec.nnz))
        blocks = -(-max(spec.nnz * lanes, lines + 1) // THREADS)
        self._launch = self._launch_of(ADD, options(spec.value_type, group, lanes), blocks, 0, self._given)

    def _allocate(self, nbytes: int) -> Storage:
        return self._executor.device.allocate(max(1, nbytes), self._executor.stream)

    def _launch_of(self, name: str, chosen: tuple[str, ...], blocks: int, shared: int, given: tuple[Any, ...]) -> Any:
        """A function that launches a kernel with these argument values, and keeps their memory alive."""
        pointers = (ctypes.c_void_p * len(given))(*map(ctypes.addressof, given))
        function = loaded(SOURCE, name, chosen, self._executor.device)
        fixed = (ctypes.c_void_p(function), blocks, 1, 1, THREADS, 1, 1, shared, self._executor.target)
        return partial(driver.cuLaunchKernel.unchecked, *fixed, pointers, None)

    def _list_terms(
        self, spec: SparseSpec, pattern: tuple[int, int], indices: Sequence[int], sizes: tuple[int, int],
        lists: tuple[int, int | None],
    ) -> None:  # fmt: skip
        """Count the terms of each element, or list them; `lists` are the addresses of start indices and of terms."""
        (entries, group), lines = sizes, spec.shape[0]
        if not lines:
            return
        groups = THREADS // group
        addresses = map(ctypes.c_void_p, (*indices, *pattern, *lists))
        arguments = (*addresses, ctypes.c_int(lines), ctypes.c_uint(entries))
        chosen, shared = options(spec.value_type, group, 1), entries * groups * ENTRY_BYTES
        check(self._executor, self._launch_of(LIST, chosen, -(-lines // groups), shared, arguments)())

    def _count_terms(
        self, spec: SparseSpec, pattern: tuple[int, int], indices: Sequence[int], sizes: tuple[int, int]
    ) -> tuple[Storage, np.ndarray]:
        """Memory for the index at which the terms of each element begin, and these indices, summed up on the host."""
        starts, counts = self._allocate((spec.nnz + 1) * INT_BYTES), np.zeros(spec.nnz + 1, np.int64)
        if spec.nnz:
            self._list_terms(spec, pattern, indices, sizes, (starts.base, None))
            np.cumsum(read_i32(self._executor, starts.base, spec.nnz), out=counts[1:])
        return starts, counts

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Write rows, columns and values for the operands at some addresses."""
        for slot, place in zip(self._given, self._places, strict=False):
            slot.value = addresses[place] or None
        check(self._executor, self._launch())
