"""Kernels of this library that copy matrices on the device: with new strides, one triangle, or the conjugate.

LAPACK's routines are column-major and overwrite their operands: plans copy operands into memory that a routine may
overwrite, and results out of it. NVRTC compiles the kernel for the current GPU. This module does not depend on
requests.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import TYPE_CHECKING

from dispatch.libraries.nvrtc.launching import KernelStep, Strides, check

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer

__all__ = [
    "SOURCE",
    "Copy",
    "CopyMode",
    "FillNanWhere",
    "FlagNonfinite",
    "PointerList",
    "check",
    "kernel_of",
    "options",
]

TILE, LINES = 32, 8
REALS = {1: "signed char", 2: "short", 4: "float", 8: "double"}  # by size in bytes
BLOCKS_PER_MATRIX = 256  # blocks per matrix; they rarely have work
MAX_BLOCKS = 65535  # limit of the y and z dimensions of a grid

# A tile is read along the dense direction of the source and written along the dense direction of the target.
SOURCE = r"""
#define NAN __int_as_float(0x7fffffff)
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

__device__ bool is_copied(int mode, Int row, Int col) {
    return mode == 0 || (mode == 1 && row >= col) || (mode == 2 && row <= col)
        || (mode == 5 && row < col) || (mode == 6 && row > col);
}

extern "C" __global__ void copy_matrix(
    const Element* source, Element* target, Int rows, Int cols, Int batch, Strides from, Strides to, int mode, int conj)
{
    __shared__ Element tile[32][33];
    const int x = threadIdx.x;
    const bool read_rows = abs(from.row) > abs(from.col), write_rows = abs(to.row) > abs(to.col);
    for (Int first_col = (Int)blockIdx.y * 32; first_col < cols; first_col += (Int)gridDim.y * 32)
    for (Int number = blockIdx.z; number < batch; number += gridDim.z) {
        const Int first_row = (Int)blockIdx.x * 32;
        for (int y = threadIdx.y; y < 32; y += 8) {
            const int i = read_rows ? y : x, j = read_rows ? x : y;
            const Int row = first_row + i, col = first_col + j;
            Element value = {};
            const bool copied = is_copied(mode, row, col);
            if (mode == 3) value.part[0] = row == col;
            else if (row < rows && col < cols && copied) {
                value = source[number * from.batch + row * from.row + col * from.col];
                if (PARTS == 2 && conj) value.part[PARTS - 1] = -value.part[PARTS - 1];
            }
            tile[j][i] = value;
        }
        __syncthreads();
        for (int y = threadIdx.y; y < 32; y += 8) {
            const int i = write_rows ? y : x, j = write_rows ? x : y;
            const Int row = first_row + i, col = first_col + j;
            if (row < rows && col < cols && (mode < 5 || is_copied(mode, row, col)))
                target[number * to.batch + row * to.row + col * to.col] = tile[j][i];
        }
        __syncthreads();
    }
}

// The results of matrices whose status is not 0 become NaN.
extern "C" __global__ void fill_nan_where(
    const int* info, Element* target, Int rows, Int cols, Int batch, Strides to)
{
    for (Int number = blockIdx.y; number < batch; number += gridDim.y) {
        if (info[number] == 0) continue;
        for (Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += (Int)gridDim.x * blockDim.x)
            for (int part = 0; part < PARTS; part++)
                target[number * to.batch + i % rows * to.row + i / rows * to.col].part[part] = (REAL)NAN;
    }
}

// The flag of a matrix that has NaN or infinities becomes 1.
extern "C" __global__ void flag_nonfinite(const Element* source, int* flags, Int rows, Int cols, Int batch, Strides at)
{
    for (Int number = blockIdx.y; number < batch; number += gridDim.y) {
        bool found = false;
        for (Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += (Int)gridDim.x * blockDim.x)
            for (int part = 0; part < PARTS; part++) {
                const REAL x = source[number * at.batch + i % rows * at.row + i / rows * at.col].part[part];
                found |= x - x != 0;
            }
        if (found) flags[number] = 1;
    }
}

extern "C" __global__ void list_pointers(char* first, Int step, Int count, char** list)
{
    const Int number = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (number < count) list[number] = first + number * step;
}
"""


class CopyMode(IntEnum):
    """The elements that are copied; the others become 0 and are not read."""

    ALL = 0
    LOWER = 1
    UPPER = 2
    IDENTITY = 3  # ones on the diagonal; the source is not read
    ZERO = 4  # the source is not read
    STRICT_UPPER = 5  # here and in the next mode the other elements of the target are unchanged
    STRICT_LOWER = 6


def options(dtype: Dtype) -> tuple[str, ...]:
    """NVRTC's options for elements of a dtype; elements that are only copied are selected by size."""
    parts = 2 if dtype.is_complex else 1
    real = REALS[dtype.itemsize // parts]
    return "-std=c++17", f"-DREAL={real}", f"-DPARTS={parts}"


def kernel_of(name: str, dtype: Dtype, source: str = SOURCE) -> tuple[str, str, tuple[str, ...]]:
    """A kernel for elements of a dtype."""
    return source, name, options(dtype)


class Copy(KernelStep):
    """A plan step that copies a matrix, or a batch of them; source and target may be the same matrix."""

    __slots__ = ()

    def __init__(
        self, executor: CudaExecutor, source: Matrix, target: Matrix, batch: int, mode: CopyMode, *, conj: bool
    ) -> None:
        rows, cols = source.rows, source.cols
        strides = (Strides.of(source), Strides.of(target))
        arguments = (source.pointer, target.pointer, rows, cols, batch, *strides, mode, ctypes.c_int(conj))
        grid = (-(-rows // TILE), min(-(-cols // TILE), MAX_BLOCKS), min(batch, MAX_BLOCKS))
        super().__init__(executor, kernel_of("copy_matrix", source.dtype), grid, (TILE, LINES), arguments)


class FillNanWhere(KernelStep):
    """A plan step that sets the results of matrices whose status is not 0 to NaN; statuses are on the device."""

    __slots__ = ()

    def __init__(self, executor: CudaExecutor, info: OperandPointer, target: Matrix, batch: int) -> None:
        arguments = (info, target.pointer, target.rows, target.cols, batch, Strides.of(target))
        super().__init__(
            executor, kernel_of("fill_nan_where", target.dtype), _grid(target, batch), (TILE * LINES,), arguments
        )


class FlagNonfinite(KernelStep):
    """A plan step that sets the flags, an i32 each, of matrices with NaN or infinities to 1."""

    __slots__ = ()

    def __init__(self, executor: CudaExecutor, source: Matrix, flags: OperandPointer, batch: int) -> None:
        arguments = (source.pointer, flags, source.rows, source.cols, batch, Strides.of(source))
        kernel = kernel_of("flag_nonfinite", source.dtype)
        super().__init__(executor, kernel, _grid(source, batch), (TILE * LINES,), arguments)


def _grid(matrix: Matrix, batch: int) -> tuple[int, int]:
    return min(-(-matrix.rows * matrix.cols // (TILE * LINES)), BLOCKS_PER_MATRIX), min(batch, MAX_BLOCKS)


class PointerList(KernelStep):
    """A plan step that writes the array of the addresses of a batch of matrices to device memory."""

    __slots__ = ()

    def __init__(self, executor: CudaExecutor, matrix: Matrix, target: OperandPointer, batch: int) -> None:
        arguments, grid = (matrix.pointer, matrix.pointer.batch_stride, batch, target), (-(-batch // (TILE * LINES)),)
        super().__init__(executor, kernel_of("list_pointers", matrix.dtype), grid, (TILE * LINES,), arguments)
