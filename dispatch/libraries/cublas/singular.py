"""The LU factorization of the exactly singular matrices of a batch, by a kernel of this library.

LAPACK skips a column without a pivot and factorizes the rest; on an H100 `getrfBatched` of cuBLAS 13.1 left factors
whose product is not the matrix. A matrix with a status above 0, or with an exact 0 on U's diagonal, is therefore
factorized again, by a block of threads. For other matrices the kernel reads only the diagonal. This module does not
depend on requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.libraries.cusolver.copies import MAX_BLOCKS, kernel_of
from dispatch.libraries.nvrtc.launching import KernelStep, Strides

if TYPE_CHECKING:
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer

__all__ = ["SOURCE", "RefactorizeSingular"]

THREADS = 128
SOURCE = r"""
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

// As LAPACK compares them: of complex numbers the sum of both parts' magnitudes.
__device__ REAL size_of(Element x)
{
    const REAL real = x.part[0] < 0 ? -x.part[0] : x.part[0], imag = x.part[PARTS - 1];
    return PARTS == 1 ? real : real + (imag < 0 ? -imag : imag);
}

__device__ Element product(Element x, Element y)
{
    Element z;
    z.part[0] = x.part[0] * y.part[0];
    if (PARTS == 2) {
        z.part[0] -= x.part[PARTS - 1] * y.part[PARTS - 1];
        z.part[PARTS - 1] = x.part[0] * y.part[PARTS - 1] + x.part[PARTS - 1] * y.part[0];
    }
    return z;
}

// Both are made about 1 by the divisor's size, so that no square overflows.
__device__ Element quotient(Element x, Element y)
{
    if (PARTS == 1) {
        x.part[0] /= y.part[0];
        return x;
    }
    const REAL size = size_of(y);
    for (int part = 0; part < PARTS; part++) {
        x.part[part] /= size;
        y.part[part] /= size;
    }
    const REAL square = y.part[0] * y.part[0] + y.part[PARTS - 1] * y.part[PARTS - 1];
    y.part[PARTS - 1] = -y.part[PARTS - 1];
    Element z = product(x, y);
    for (int part = 0; part < PARTS; part++) z.part[part] /= square;
    return z;
}

__device__ void factorize(Element* lu, int* pivots, int* info, Int n, Strides to)
{
    __shared__ Int pivot;
    __shared__ REAL largest;
    int first_zero = 0;
    for (Int k = 0; k < n; k++) {
        if (threadIdx.x == 0) {
            pivot = k;
            largest = size_of(lu[k * to.row + k * to.col]);
            for (Int i = k + 1; i < n; i++) {
                const REAL size = size_of(lu[i * to.row + k * to.col]);
                if (size > largest) {
                    largest = size;
                    pivot = i;
                }
            }
            pivots[k] = (int)pivot + 1;
        }
        __syncthreads();
        if (largest == 0) {  // all below it is 0, too
            if (!first_zero) first_zero = (int)k + 1;
            __syncthreads();
            continue;
        }
        for (Int j = threadIdx.x; pivot != k && j < n; j += blockDim.x) {
            const Element one = lu[k * to.row + j * to.col];
            lu[k * to.row + j * to.col] = lu[pivot * to.row + j * to.col];
            lu[pivot * to.row + j * to.col] = one;
        }
        __syncthreads();
        for (Int i = k + 1 + threadIdx.x; i < n; i += blockDim.x)
            lu[i * to.row + k * to.col] = quotient(lu[i * to.row + k * to.col], lu[k * to.row + k * to.col]);
        __syncthreads();
        const Int rest = n - k - 1;
        for (Int number = threadIdx.x; number < rest * rest; number += blockDim.x) {
            const Int i = k + 1 + number % rest, j = k + 1 + number / rest;
            const Element change = product(lu[i * to.row + k * to.col], lu[k * to.row + j * to.col]);
            for (int part = 0; part < PARTS; part++) lu[i * to.row + j * to.col].part[part] -= change.part[part];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) *info = first_zero;
}

extern "C" __global__ void refactorize_singular(
    const Element* source, Element* target, int* pivots, int* info, Int n, Int batch, Strides from, Strides to)
{
    for (Int number = blockIdx.x; number < batch; number += gridDim.x) {
        const Element* a = source + number * from.batch;
        Element* lu = target + number * to.batch;
        int again = info[number] != 0;
        for (Int i = threadIdx.x; i < n; i += blockDim.x) again |= size_of(lu[i * (to.row + to.col)]) == 0;
        if (!__syncthreads_or(again)) continue;
        for (Int i = threadIdx.x; i < n * n; i += blockDim.x)
            lu[i % n * to.row + i / n * to.col] = a[i % n * from.row + i / n * from.col];
        __syncthreads();
        factorize(lu, pivots + number * n, info + number, n, to);
        __syncthreads();
    }
}
"""


class RefactorizeSingular(KernelStep):
    """Factorizes singular matrices again, after `getrfBatched`; `a` is the original matrix.

    Pivots, of 32 bits, and statuses are dense.
    """

    __slots__ = ()

    def __init__(
        self, executor: CudaExecutor, a: Matrix, lu: Matrix, pivots: OperandPointer, info: OperandPointer, batch: int
    ) -> None:
        arguments = (a.pointer, lu.pointer, pivots, info, a.rows, batch, Strides.of(a), Strides.of(lu))
        kernel = kernel_of("refactorize_singular", a.dtype, SOURCE)
        super().__init__(executor, kernel, (min(batch, MAX_BLOCKS),), (THREADS,), arguments)
