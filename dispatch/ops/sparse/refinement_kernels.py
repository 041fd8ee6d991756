"""Kernels that refine a solution by factors of f32, in CUDA C++: conversion to f32, and residuals in f64.

A thread computes one row of one right-hand side. If only one triangle of a matrix is stored, an element counts for two
rows, so sums are atomic; if the whole matrix is stored, each thread adds up its row alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.ops.sparse.direct import SpsolveRequest

__all__ = ["SOURCE", "THREADS", "options"]

THREADS = 256
INTEGERS = {4: "int", 8: "long long"}

SOURCE = r"""
typedef long long Int;
typedef unsigned long long Bits;
struct __align__(8 * PARTS) Wide { double part[PARTS]; };
struct __align__(4 * PARTS) Narrow { float part[PARTS]; };

__device__ Wide wide(const Narrow& x)
{
    Wide y;
    for (int part = 0; part < PARTS; ++part) y.part[part] = x.part[part];
    return y;
}

__device__ Narrow narrow(const Wide& x)
{
    Narrow y;
    for (int part = 0; part < PARTS; ++part) y.part[part] = (float)x.part[part];
    return y;
}

__device__ double size_of(const Wide& x)
{
    double sum = 0;
    for (int part = 0; part < PARTS; ++part) sum += fabs(x.part[part]);
    return sum;
}

__device__ Wide times(const Wide& x, const Wide& y, bool conj)
{
    Wide z;
    if (PARTS == 1) { z.part[0] = x.part[0] * y.part[0]; return z; }
    const double turned = conj ? -x.part[PARTS - 1] : x.part[PARTS - 1];
    z.part[0] = x.part[0] * y.part[0] - turned * y.part[PARTS - 1];
    z.part[PARTS - 1] = x.part[0] * y.part[PARTS - 1] + turned * y.part[0];
    return z;
}

// A block's row and right-hand side; there are as many blocks for each.
struct Spot { Int row, side; };
__device__ Spot spot_of(Int n)
{
    const Int blocks = (n + blockDim.x - 1) / blockDim.x;
    return Spot{(Int)(blockIdx.x % blocks) * blockDim.x + threadIdx.x, (Int)(blockIdx.x / blocks)};
}

extern "C" __global__ void narrow_values(const Wide* from, Narrow* to, Int count)
{
    const Int place = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) to[place] = narrow(from[place]);
}

// Before anything is taken off the residual is b; `sizes` are those of what is added up in each row.
extern "C" __global__ void begin_residual(const Wide* b, Int ld_b, Wide* r, double* sizes, Int n)
{
    const Spot at = spot_of(n);
    if (at.row >= n) return;
    const Wide right = b[at.side * ld_b + at.row];
    r[at.side * n + at.row] = right;
    sizes[at.side * n + at.row] = size_of(right);
}

extern "C" __global__ void take_off_product(
    const Wide* elements, const OFFSET* rows, const INDEX* columns, const Wide* x, Int ld_x,
    Wide* r, double* sizes, Int n)
{
    const Spot at = spot_of(n);
    if (at.row >= n) return;
    const Wide* mine = x + at.side * ld_x;
    Wide sum = {};
    double size = 0;
    for (Int k = (Int)rows[at.row] - BASE; k < (Int)rows[at.row + 1] - BASE; ++k) {
        const Int column = (Int)columns[k] - BASE;
        if (VIEW == 1 && column > at.row || VIEW == 2 && column < at.row) continue;
        const Wide term = times(elements[k], mine[column], false);
        for (int part = 0; part < PARTS; ++part) sum.part[part] += term.part[part];
        size += size_of(elements[k]) * size_of(mine[column]);
        if (VIEW && column != at.row) {
            const Wide mirrored = times(elements[k], mine[at.row], CONJ);
            const Int place = at.side * n + column;
            for (int part = 0; part < PARTS; ++part) atomicAdd(&r[place].part[part], -mirrored.part[part]);
            atomicAdd(&sizes[place], size_of(elements[k]) * size_of(mine[at.row]));
        }
    }
    const Int place = at.side * n + at.row;
    for (int part = 0; part < PARTS; ++part) {
        if (VIEW) atomicAdd(&r[place].part[part], -sum.part[part]);
        else r[place].part[part] -= sum.part[part];
    }
    if (VIEW) atomicAdd(&sizes[place], size);
    else sizes[place] += size;
}

// The largest residual and the largest sum of sizes of each right-hand side, as the bits of numbers that are not
// negative: they are in the same order, and NaN is above all.
extern "C" __global__ void narrow_residual(const Wide* r, const double* sizes, Narrow* right, Bits* most, Int n)
{
    __shared__ Bits largest[2][THREADS];
    const Spot at = spot_of(n);
    Bits found[2] = {0, 0};
    if (at.row < n) {
        const Int place = at.side * n + at.row;
        right[place] = narrow(r[place]);
        const double both[2] = {size_of(r[place]), fabs(sizes[place])};
        memcpy(found, both, sizeof(found));
    }
    for (int which = 0; which < 2; ++which) largest[which][threadIdx.x] = found[which];
    __syncthreads();
    for (int half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half)
            for (int which = 0; which < 2; ++which) {
                const Bits other = largest[which][threadIdx.x + half];
                if (other > largest[which][threadIdx.x]) largest[which][threadIdx.x] = other;
            }
        __syncthreads();
    }
    if (threadIdx.x < 2) atomicMax(&most[2 * at.side + threadIdx.x], largest[threadIdx.x][0]);
}

extern "C" __global__ void add_correction(const Narrow* correction, Wide* x, Int ld_x, Int is_first, Int n)
{
    const Spot at = spot_of(n);
    if (at.row >= n) return;
    const Wide more = wide(correction[at.side * n + at.row]);
    Wide* mine = x + at.side * ld_x + at.row;
    for (int part = 0; part < PARTS; ++part) mine->part[part] = (is_first ? 0 : mine->part[part]) + more.part[part];
}
"""


def options(request: SpsolveRequest, view: int, *, conj: bool) -> tuple[str, ...]:
    """NVRTC's options; `view` is a cudssMatrixViewType_t, and `conj` says whether the other triangle is conjugated."""
    parts = 2 if request.values.dtype.is_complex else 1
    integers = [INTEGERS[getattr(request, name).dtype.itemsize] for name in ("rows", "columns")]
    numbers = f"-DPARTS={parts}", f"-DBASE={request.form.base}", f"-DVIEW={view}", f"-DCONJ={int(conj)}"
    return "-std=c++17", f"-DTHREADS={THREADS}", f"-DOFFSET={integers[0]}", f"-DINDEX={integers[1]}", *numbers
