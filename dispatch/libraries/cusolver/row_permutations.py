"""Row interchanges of LU: pivots as a permutation of rows, and copies of matrices with permuted rows.

LAPACK's pivots are interchanges, which `getrs` performs one by one. Here a kernel converts them to a permutation once,
and the copy that is needed anyway permutes the rows. NVRTC compiles the kernels for the current GPU. This module does
not depend on requests.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from dispatch.libraries.cusolver.copies import LINES, MAX_BLOCKS, TILE, kernel_of
from dispatch.libraries.nvrtc.launching import KernelStep, Strides

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer

__all__ = ["MAX_SHARED", "SOURCE", "PermutationFromPivots", "PermuteMode", "PermuteRows"]

THREADS = 256
MAX_SHARED = 8192  # up to this many rows the row numbers are in the shared memory of a block

# Row i was exchanged with row pivots[i] - 1, which is not an earlier one, for i = 0, 1, … The row that ends at i was at
# pivots[i] - 1 before exchange i. It came there by the last exchange j before i with the same pivot, if there is one:
# from row j, which it reached by the last exchange before j whose pivot is j, and so on. `latest[j]` is that exchange,
# or -1. No exchange is on the paths of two rows, so all paths together have at most n steps. A warp reads 32 pivots at
# a time; an invalid pivot counts as no exchange.
SOURCE = r"""
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

__device__ int pivot_of(const Int* pivots, Int i, Int n) {
    const Int pivot = pivots[i] - 1;
    return (int)(pivot < i || pivot >= n ? i : pivot);
}

extern "C" __global__ void permutation_from_pivots(
    const Int* every_pivot, int* every_order, int* scratch, Int n, Int batch)
{
    __shared__ int shared[MAX_SHARED], staged[1024];
    for (Int number = blockIdx.x; number < batch; number += gridDim.x) {
        const Int* pivots = every_pivot + number * n;
        int* order = every_order + number * n;
        int* latest = n <= MAX_SHARED ? shared : scratch + number * n;
        for (Int i = threadIdx.x; i < n; i += blockDim.x) latest[i] = -1;
        for (Int begin = 0; begin < n; begin += 1024) {
            __syncthreads();
            // Lanes behind the last row have numbers that no pivot has.
            for (int i = threadIdx.x; i < 1024; i += blockDim.x)
                staged[i] = begin + i < n ? pivot_of(pivots, begin + i, n) : -1 - i % 32;
            __syncthreads();
            if (threadIdx.x >= 32) continue;
            const int lane = threadIdx.x;
            for (int first = 0; first < 1024 && begin + first < n; first += 32) {
                const Int i = begin + first + lane;
                const int pivot = staged[first + lane];
                const unsigned same = __match_any_sync(0xffffffffu, pivot);
                const unsigned before = same & ((1u << lane) - 1), behind = same & ~((2u << lane) - 1);
                if (i < n) order[i] = before ? (int)begin + first + 31 - __clz(before) : latest[pivot];
                __syncwarp();
                if (i < n && !behind) latest[pivot] = (int)i;
                __syncwarp();
            }
        }
        __syncthreads();
        // An exchange of a row with itself comes from where it would come.
        for (Int i = threadIdx.x; i < n; i += blockDim.x)
            if (pivot_of(pivots, i, n) == i) latest[i] = order[i];
        __syncthreads();
        for (Int i = threadIdx.x; i < n; i += blockDim.x) {
            int row = order[i];
            if (row < 0) row = pivot_of(pivots, i, n);
            else while (latest[row] >= 0) row = latest[row];
            order[i] = row;
        }
        __syncthreads();
    }
}

// Row i of the target is row order[i] of the source, or of the identity without one; or the other way round.
extern "C" __global__ void permute_rows(
    const Element* source, Element* target, const int* every_order, Int rows, Int cols, Int batch, Strides from,
    Strides to, int kind)
{
    __shared__ Element tile[32][33];
    const int x = threadIdx.x;
    const bool read_rows = abs(from.row) > abs(from.col), write_rows = abs(to.row) > abs(to.col);
    for (Int first_col = (Int)blockIdx.y * 32; first_col < cols; first_col += (Int)gridDim.y * 32)
    for (Int number = blockIdx.z; number < batch; number += gridDim.z) {
        const Int first_row = (Int)blockIdx.x * 32;
        const int* order = every_order + number * rows;
        for (int y = threadIdx.y; y < 32; y += 8) {
            const int i = read_rows ? y : x, j = read_rows ? x : y;
            const Int row = first_row + i, col = first_col + j;
            Element value = {};
            if (row < rows && col < cols) {
                const Int other = kind == 1 ? row : order[row];
                if (kind == 2) value.part[0] = other == col;
                else value = source[number * from.batch + other * from.row + col * from.col];
            }
            tile[j][i] = value;
        }
        __syncthreads();
        for (int y = threadIdx.y; y < 32; y += 8) {
            const int i = write_rows ? y : x, j = write_rows ? x : y;
            const Int row = first_row + i, col = first_col + j;
            if (row < rows && col < cols) {
                const Int other = kind == 1 ? order[row] : row;
                target[number * to.batch + other * to.row + col * to.col] = tile[j][i];
            }
        }
        __syncthreads();
    }
}
""".replace("MAX_SHARED", str(MAX_SHARED))


class PermuteMode(IntEnum):
    """The rows of a copy: permuted, permuted back, or those of the permuted identity."""

    GATHER = 0
    SCATTER = 1
    IDENTITY = 2  # the source is not read


class PermutationFromPivots(KernelStep):
    """A plan step that converts pivots to a permutation of rows: i32 from i64 that count from 1, dense.

    `scratch` has the same number of i32, for matrices of more than `MAX_SHARED` rows.
    """

    __slots__ = ()

    def __init__(
        self,
        executor: CudaExecutor,
        pivots: OperandPointer,
        order: OperandPointer,
        scratch: OperandPointer | None,
        like: Matrix,
        batch: int,
    ) -> None:
        arguments = (pivots, order, order if scratch is None else scratch, like.rows, batch)
        kernel = kernel_of("permutation_from_pivots", like.dtype, SOURCE)
        super().__init__(executor, kernel, (min(batch, MAX_BLOCKS),), (THREADS,), arguments)


class PermuteRows(KernelStep):
    """A copy of a matrix, or of a batch, with permuted rows; source and target must not overlap."""

    __slots__ = ()

    def __init__(
        self,
        executor: CudaExecutor,
        source: Matrix,
        target: Matrix,
        order: OperandPointer,
        batch: int,
        kind: PermuteMode,
    ) -> None:
        rows, cols = target.rows, target.cols
        strides = (Strides.of(source), Strides.of(target))
        arguments = (source.pointer, target.pointer, order, rows, cols, batch, *strides, kind)
        grid = (-(-rows // TILE), min(-(-cols // TILE), MAX_BLOCKS), min(batch, MAX_BLOCKS))
        super().__init__(executor, kernel_of("permute_rows", target.dtype, SOURCE), grid, (TILE, LINES), arguments)
