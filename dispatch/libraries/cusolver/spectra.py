"""Kernels that postprocess the results of eigenvalue routines: subsets of eigenvalues, pairs, statuses.

This module does not depend on requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.libraries.cusolver.copies import kernel_of
from dispatch.libraries.nvrtc.launching import KernelStep, Strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer

__all__ = [
    "SPECTRA",
    "ComplexVectors",
    "ConvertSygvjStatus",
    "FillNanAfterFound",
    "MarkUnconverged",
    "MatchEigenvectors",
    "ZeroNonfinite",
]

THREADS = 256
MAX_BLOCKS = 65535  # limit of the y dimension of a grid
BLOCKS = 256  # blocks per matrix

SPECTRA = r"""
#define NAN __int_as_float(0x7fffffff)
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct __align__(sizeof(REAL) * 2) Complex { REAL real, imag; };
struct Strides { Int row, col, batch; };

// Columns behind those that were found become NaN.
extern "C" __global__ void fill_nan_after_found(
    const Int* found, Element* target, Int rows, Int cols, Int batch, Strides to)
{
    for (Int number = blockIdx.y; number < batch; number += gridDim.y) {
        const Int first = found[number];
        for (Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; i < rows * cols; i += (Int)gridDim.x * blockDim.x)
            if (i / rows >= first)
                for (int part = 0; part < PARTS; part++)
                    target[number * to.batch + i % rows * to.row + i / rows * to.col].part[part] = (REAL)NAN;
    }
}

// Of a pair of conjugate eigenvalues the vectors are two real columns: x + i*y and x - i*y. The first of a pair has the
// positive imaginary part, so that the sign tells the one from the other.
extern "C" __global__ void complex_vectors(
    const Complex* values, const REAL* source, Complex* target, Int n, Int batch, Strides from, Strides to)
{
    for (Int number = blockIdx.y; number < batch; number += gridDim.y)
        for (Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; i < n * n; i += (Int)gridDim.x * blockDim.x) {
            const Int row = i % n, col = i / n;
            REAL sign = values[number * n + col].imag;
            if ((sign < 0 && col == 0) || (sign > 0 && col == n - 1)) sign = 0;  // where nothing converged
            const REAL* at = source + number * from.batch + row * from.row + (col - (sign < 0)) * from.col;
            Complex value = {at[0], 0};
            if (sign > 0) value.imag = at[from.col];
            if (sign < 0) value.imag = -at[from.col];
            target[number * to.batch + row * to.row + col * to.col] = value;
        }
}

// The eigenvalues of the adjoint are the conjugate ones in an order of their own: each value in turn takes the nearest
// that is left, which is the first of several, and its vector. A block has a matrix. Of what is no number the i-th is
// taken for the i-th. Where the adjoint's status is not 0, the matrix has it, too.
extern "C" __global__ void match_eigenvectors(
    const Complex* values, Complex* others, const Complex* source, Complex* target, int* info, const int* statuses,
    Int n, Int batch, Strides from, Strides to)
{
    __shared__ double distances[256];
    __shared__ Int places[256];
    const int thread = threadIdx.x, threads = blockDim.x;
    for (Int number = blockIdx.x; number < batch; number += gridDim.x) {
        Complex* left = others + number * n;
        for (Int i = 0; i < n; i++) {
            const Complex value = values[number * n + i];
            double nearest = -1;
            Int place = i;
            for (Int j = thread; j < n; j += threads) {
                const double distance = hypot((double)left[j].real - value.real, (double)left[j].imag + value.imag);
                if (distance >= 0 && (nearest < 0 || distance < nearest)) nearest = distance, place = j;
            }
            distances[thread] = nearest, places[thread] = place;
            __syncthreads();
            for (int half = threads / 2; half; half /= 2) {
                if (thread < half) {
                    const double other = distances[thread + half];
                    const bool nearer = other < distances[thread]
                        || (other == distances[thread] && places[thread + half] < places[thread]);
                    if (other >= 0 && (distances[thread] < 0 || nearer))
                        distances[thread] = other, places[thread] = places[thread + half];
                }
                __syncthreads();
            }
            place = places[0];
            for (Int row = thread; row < n; row += threads)
                target[number * to.batch + row * to.row + i * to.col]
                    = source[number * from.batch + row * from.row + place * from.col];
            if (thread == 0) left[place].real = (REAL)NAN;  // which nothing is near to
            __syncthreads();
        }
        if (thread == 0 && info[number] == 0) info[number] = statuses[number];
    }
}

// A matrix that has NaN or infinities becomes zeros, and its flag 1. A block has a matrix.
extern "C" __global__ void zero_nonfinite(Element* source, int* flags, Int rows, Int cols, Int batch, Strides at)
{
    __shared__ int found;
    const Int thread = threadIdx.x, threads = blockDim.x;
    for (Int number = blockIdx.x; number < batch; number += gridDim.x) {
        Element* matrix = source + number * at.batch;
        if (thread == 0) found = 0;
        __syncthreads();
        for (Int i = thread; i < rows * cols; i += threads)
            for (int part = 0; part < PARTS; part++) {
                const REAL x = matrix[i % rows * at.row + i / rows * at.col].part[part];
                if (x - x != 0) found = 1;
            }
        __syncthreads();
        for (Int i = thread; found && i < rows * cols; i += threads)
            for (int part = 0; part < PARTS; part++)
                matrix[i % rows * at.row + i / rows * at.col].part[part] = 0;
        if (thread == 0) flags[number] = found;
        __syncthreads();
    }
}

// Where there is a flag the status is that of a routine that did not converge.
extern "C" __global__ void mark_unconverged(int* info, const int* flags, Int batch)
{
    const Int number = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (number < batch && flags[number]) info[number] = 1;
}

// 1 … n say which minor of B is not positive definite and n + 1 that nothing converged: the other way round than SYGVD.
extern "C" __global__ void convert_sygvj_status(int* info, Int n, Int batch)
{
    const Int number = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= batch) return;
    const int status = info[number];
    if (status > 0) info[number] = status > n ? 1 : (int)n + status;
}
"""


class SpectrumStep(KernelStep):
    """A step of one kernel; its first arguments are addresses."""

    __slots__ = ()
    kernel: str

    def __init__(
        self, executor: CudaExecutor, places: Sequence[OperandPointer], of: Matrix, grid: tuple[int, ...], *numbers: Any
    ) -> None:
        super().__init__(executor, kernel_of(self.kernel, of.dtype, SPECTRA), grid, (THREADS,), (*places, *numbers))


class FillNanAfterFound(SpectrumStep):
    """The columns of a matrix after those that were found become NaN; `found` is an i64 for each matrix."""

    kernel = "fill_nan_after_found"

    def __init__(self, executor: CudaExecutor, found: OperandPointer, target: Matrix, batch: int) -> None:
        numbers = (target.rows, target.cols, batch)
        grid = (min(-(-target.rows * target.cols // THREADS), BLOCKS), min(batch, MAX_BLOCKS))
        super().__init__(executor, (found, target.pointer), target, grid, *numbers, Strides.of(target))


class ComplexVectors(SpectrumStep):
    """Complex eigenvectors from LAPACK's real columns; `values` are the complex eigenvalues, dense."""

    kernel = "complex_vectors"

    def __init__(
        self, executor: CudaExecutor, values: OperandPointer, source: Matrix, target: Matrix, batch: int
    ) -> None:
        numbers = (source.rows, batch)
        grid = (min(-(-source.rows * source.cols // THREADS), BLOCKS), min(batch, MAX_BLOCKS))
        places = (values, source.pointer, target.pointer)
        super().__init__(executor, places, source, grid, *numbers, Strides.of(source), Strides.of(target))


class MatchEigenvectors(SpectrumStep):
    """Reorders the eigenvectors of the adjoint to match `values`; its eigenvalues, `others`, are overwritten."""

    kernel = "match_eigenvectors"

    def __init__(
        self,
        executor: CudaExecutor,
        values: OperandPointer,
        others: OperandPointer,
        source: Matrix,
        target: Matrix,
        info: OperandPointer,
        status: OperandPointer,
        batch: int,
    ) -> None:
        numbers = (source.rows, batch)
        places = (values, others, source.pointer, target.pointer, info, status)
        grid = (min(batch, MAX_BLOCKS),)
        super().__init__(executor, places, source, grid, *numbers, Strides.of(source), Strides.of(target))


class ZeroNonfinite(SpectrumStep):
    """Matrices with NaN or infinities become zeros, and their flags, an i32 each, 1; other flags are 0."""

    kernel = "zero_nonfinite"

    def __init__(self, executor: CudaExecutor, matrix: Matrix, flags: OperandPointer, batch: int) -> None:
        numbers = (matrix.rows, matrix.cols, batch)
        grid = (min(batch, MAX_BLOCKS),)
        super().__init__(executor, (matrix.pointer, flags), matrix, grid, *numbers, Strides.of(matrix))


class MarkUnconverged(SpectrumStep):
    """The status becomes 1 for matrices with a flag."""

    kernel = "mark_unconverged"

    def __init__(
        self, executor: CudaExecutor, info: OperandPointer, flags: OperandPointer, of: Matrix, batch: int
    ) -> None:
        super().__init__(executor, (info, flags), of, (-(-batch // THREADS),), batch)


class ConvertSygvjStatus(SpectrumStep):
    """Converts statuses of `sygvj` to those of `sygvd`: above n if B is not positive definite."""

    kernel = "convert_sygvj_status"

    def __init__(self, executor: CudaExecutor, info: OperandPointer, of: Matrix, batch: int) -> None:
        grid = (-(-batch // THREADS),)
        super().__init__(executor, (info,), of, grid, of.rows, batch)
