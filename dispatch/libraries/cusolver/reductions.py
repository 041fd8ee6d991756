"""Small kernels over matrices and vectors that stay on the device: determinants, norms, reciprocals, statuses.

The first argument of each is the batch, and a block has 256 threads; sums are in double precision, always in the same
order. NVRTC compiles them for the current GPU. This module does not depend on requests.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

from dispatch.libraries.cusolver.copies import MAX_BLOCKS, kernel_of
from dispatch.libraries.nvrtc.launching import KernelStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["SOURCE", "BatchKernelStep", "Reduce"]

THREADS = 256

SOURCE = r"""
typedef long long Int;
#define EACH for (Int number = blockIdx.y; number < batch; number += gridDim.y)
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

__device__ double imaginary(const Element& one) { return PARTS == 2 ? (double)one.part[PARTS - 1] : 0.0; }
__device__ double magnitude(const Element& one) {
    return PARTS == 2 ? hypot((double)one.part[0], imaginary(one)) : fabs((double)one.part[0]);
}

// A number re + i·im times 2^power, so that no product of many overflows before its end.
struct Scaled {
    double re, im;
    Int power;
    __device__ void times(double a, double b, Int other) {
        const double x = re * a - im * b, y = PARTS == 2 ? re * b + im * a : 0.0;
        const double size = fmax(fabs(x), fabs(y));
        int shift = 0;
        if (size > 0 && size <= 1.7e308) frexp(size, &shift);
        re = ldexp(x, -shift), im = ldexp(y, -shift), power += other + shift;
    }
};

// The determinant from LU's factors, or its sign and the logarithm of its magnitude. pivots count from 1.
extern "C" __global__ void determinant(
    Int batch, const Element* lu, Strides at, Int n, const Int* pivots, Element* out, REAL* logarithm)
{
    __shared__ Scaled parts[256];
    const int thread = threadIdx.x;
    EACH {
        Scaled product = {1, 0, 0};
        for (Int i = thread; i < n; i += 256) {
            const Element one = lu[number * at.batch + i * (at.row + at.col)];
            const double sign = pivots[number * n + i] == i + 1 ? 1 : -1;
            int shift = 0;
            const double size = fmax(fabs((double)one.part[0]), fabs(imaginary(one)));
            if (size > 0 && size <= 1.7e308) frexp(size, &shift);
            product.times(ldexp(sign * one.part[0], -shift), ldexp(sign * imaginary(one), -shift), shift);
        }
        parts[thread] = product;
        __syncthreads();
        for (int half = 128; half; half /= 2) {
            if (thread < half) parts[thread].times(parts[thread + half].re, parts[thread + half].im,
                                                   parts[thread + half].power);
            __syncthreads();
        }
        if (thread == 0) {
            const Scaled& all = parts[0];
            const double size = PARTS == 2 ? hypot(all.re, all.im) : fabs(all.re);
            const int power = (int)max(min(all.power, (Int)100000), (Int)-100000);
            const double scale = logarithm && size > 0 ? 1 / size : 1;
            out[number].part[0] = (REAL)(logarithm ? all.re * scale : ldexp(all.re, power));
            if (PARTS == 2) out[number].part[PARTS - 1] = (REAL)(logarithm ? all.im * scale : ldexp(all.im, power));
            if (logarithm) logarithm[number] = (REAL)(log(size) + all.power * 0.69314718055994530942);
        }
        __syncthreads();
    }
}

// Of each column the sum of magnitudes (0), the root of the sum of squares (1), the largest (2) or smallest (3), or the
// sum of squares (4). Squares are those of value / scale, so that none overflows.
struct Sum {
    double scale, total;
    __device__ void add(int kind, double scale_of, double value) {
        if (kind == 0) total += value;
        else if (kind == 2) total = total >= value || isnan(total) ? total : value;
        else if (kind == 3) total = total <= value || isnan(total) ? total : value;
        else if (scale_of > scale) {
            const double ratio = scale / scale_of;
            total = total * ratio * ratio + value, scale = scale_of;
        } else if (scale_of > 0) {
            const double ratio = scale_of == scale ? 1 : scale_of / scale;  // both may be infinite
            total += value * ratio * ratio;
        } else if (isnan(scale_of)) total = scale_of, scale = 1;
    }
};

extern "C" __global__ void reduce_columns(
    Int batch, const Element* source, Strides at, Int rows, Int cols, REAL* out, Int step, int kind)
{
    __shared__ Sum parts[256];
    const int thread = threadIdx.x;
    const bool squares = kind == 1 || kind == 4;
    EACH for (Int col = blockIdx.x; col < cols; col += gridDim.x) {
        Sum sum = {0, kind == 3 ? __longlong_as_double(0x7ff0000000000000ll) : 0};
        for (Int row = thread; row < rows; row += 256) {
            const double one = magnitude(source[number * at.batch + row * at.row + col * at.col]);
            sum.add(kind, one, squares ? 1 : one);
        }
        parts[thread] = sum;
        __syncthreads();
        for (int half = 128; half; half /= 2) {
            if (thread < half) parts[thread].add(kind, parts[thread + half].scale, parts[thread + half].total);
            __syncthreads();
        }
        if (thread == 0) {
            sum = parts[0];
            double found = sum.total;
            if (squares && sum.scale > 0) found = sum.scale * (kind == 1 ? sqrt(found) : sum.scale * found);
            out[number * step + col] = (REAL)(rows ? found : 0);
        }
        __syncthreads();
    }
}

// 1 / s of what is above ratio · s[0], 0 for the rest; and how many are above it.
extern "C" __global__ void reciprocals(Int batch, const REAL* s, Int n, double ratio, REAL* out, Int* rank)
{
    __shared__ Int counts[256];
    const int thread = threadIdx.x;
    EACH {
        const double least = n ? ratio * s[number * n] : 0;
        Int count = 0;
        for (Int i = thread; i < n; i += 256) {
            const double one = s[number * n + i];
            count += one > least;
            if (out) out[number * n + i] = (REAL)(one <= least ? 0 : 1 / one);
        }
        counts[thread] = count;
        __syncthreads();
        for (int half = 128; half; half /= 2) {
            if (thread < half) counts[thread] += counts[thread + half];
            __syncthreads();
        }
        if (thread == 0 && rank) rank[number] = counts[0];
        __syncthreads();
    }
}

extern "C" __global__ void scale_rows(
    Int batch, Element* target, Strides at, Int rows, Int cols, const REAL* factors, Int step)
{
    EACH for (Int i = (Int)blockIdx.x * 256 + threadIdx.x; i < rows * cols; i += (Int)gridDim.x * 256)
        for (int part = 0; part < PARTS; part++)
            target[number * at.batch + i % rows * at.row + i / rows * at.col].part[part] *=
                factors[number * step + i % rows];
}

// The place, from 1, of the first element of a diagonal that is exactly 0; else 0.
extern "C" __global__ void first_zero(Int batch, const Element* source, Strides at, Int n, int* info)
{
    __shared__ Int places[256];
    const int thread = threadIdx.x;
    EACH {
        Int found = n;
        for (Int i = thread; i < n && found == n; i += 256) {
            const Element one = source[number * at.batch + i * (at.row + at.col)];
            if (one.part[0] == 0 && one.part[PARTS - 1] == 0) found = i;
        }
        places[thread] = found;
        __syncthreads();
        for (int half = 128; half; half /= 2) {
            if (thread < half) places[thread] = min(places[thread], places[thread + half]);
            __syncthreads();
        }
        if (thread == 0) info[number] = places[0] < n ? (int)(places[0] + 1) : 0;
        __syncthreads();
    }
}
"""


class Reduce(IntEnum):
    """The reduction of the magnitudes of a column."""

    SUM = 0
    ROOT = 1
    MAX = 2
    MIN = 3
    SQUARES = 4


class BatchKernelStep(KernelStep):
    """A plan step of one of these kernels, or of a kernel of another source whose first argument is the batch."""

    __slots__ = ()

    def __init__(
        self,
        executor: CudaExecutor,
        name: str,
        dtype: Dtype,
        batch: int,
        blocks: int,
        arguments: Sequence[Any],
        source: str = SOURCE,
    ) -> None:
        grid = (min(blocks, MAX_BLOCKS), min(batch, MAX_BLOCKS))
        super().__init__(executor, kernel_of(name, dtype, source), grid, (THREADS,), (batch, *arguments))
