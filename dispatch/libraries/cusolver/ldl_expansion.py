"""Kernels over LAPACK's packed L·D·Lᴴ: they extract L, D and the row order, and find singular blocks of D."""

from __future__ import annotations

__all__ = ["SOURCE"]

# A block of threads computes a column. The last eliminated block of D was exchanged last: a column takes part in the
# exchanges of its own block of D and of those that were eliminated before.
SOURCE = r"""
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

__device__ Element conjugate(Element one, Int hermitian) {
    if (PARTS == 2 && hermitian) one.part[PARTS - 1] = -one.part[PARTS - 1];
    return one;
}

// Of rows that are a block of two the pivots are negative; in a run of such, every second one begins a block.
__device__ Int partner_of(const Int* pivots, Int row) {
    if (pivots[row] > 0) return row;
    Int before = 0;
    while (before < row && pivots[row - before - 1] < 0) before++;
    return before % 2 ? row - 1 : row + 1;
}

// The info of a matrix of which a block of D has the determinant 0 becomes the place of the first one, from 1 on.
extern "C" __global__ void note_singular_blocks(
    Int batch, const Element* source, Strides from, Int n, const Int* every_pivot, int* info, Int lower, Int hermitian)
{
    __shared__ int found;
    const int thread = threadIdx.x;
    for (Int number = blockIdx.y; number < batch; number += gridDim.y) {
        const Int* pivots = every_pivot + number * n;
        const Element* packed = source + number * from.batch;
        if (thread == 0) found = n;
        __syncthreads();
        for (Int row = thread; row < n; row += blockDim.x) {
            const Int other = partner_of(pivots, row);
            if (other < row || other >= n) continue;
            const Element one = packed[row * (from.row + from.col)];
            double re = one.part[0], im = PARTS == 2 && !hermitian ? one.part[PARTS - 1] : 0;
            if (other > row) {
                const Element last = packed[other * (from.row + from.col)];
                const Int below = lower ? other : row, right = lower ? row : other;
                const Element beside = packed[below * from.row + right * from.col];
                const double a = last.part[0], b = PARTS == 2 && !hermitian ? last.part[PARTS - 1] : 0;
                const double x = beside.part[0], y = PARTS == 2 ? beside.part[PARTS - 1] : 0;
                const double real = re * a - im * b - (x * x + (hermitian ? y * y : -y * y));
                im = re * b + im * a - (hermitian ? 0 : 2 * x * y);
                re = real;
            }
            if (re == 0 && im == 0) atomicMin(&found, (int)row);
        }
        __syncthreads();
        if (thread == 0 && found < n && info[number] == 0) info[number] = found + 1;
        __syncthreads();
    }
}

template <typename T> __device__ void exchange(T* first, T* second) {
    const T kept = *first;
    *first = *second, *second = kept;
}

extern "C" __global__ void expand_ldl(
    Int batch, const Element* source, Strides from, Int n, const Int* every_pivot, Element* outer, Strides to,
    Element* blocks, Strides at, Int* every_order, Int lower, Int hermitian)
{
    const int thread = threadIdx.x;
    for (Int number = blockIdx.y; number < batch; number += gridDim.y)
    for (Int col = blockIdx.x; col < n; col += gridDim.x) {
        const Int* pivots = every_pivot + number * n;
        const Element* packed = source + number * from.batch;
        const Int partner = partner_of(pivots, col);  // the other row of the column's block of D, or its own
        const Int first = min(col, partner), last = max(col, partner);
        Element* column = outer + number * to.batch + col * to.col;
        Element* block = blocks + number * at.batch + col * at.col;
        for (Int row = thread; row < n; row += blockDim.x) {
            const Element one = packed[row * from.row + col * from.col];
            Element factor = {}, diagonal = {};
            if (row == col) {
                factor.part[0] = 1, diagonal = one;
                if (PARTS == 2 && hermitian) diagonal.part[PARTS - 1] = 0;
            } else if (row == partner) {
                const bool is_packed = lower ? row > col : row < col;
                diagonal = is_packed ? one : conjugate(packed[col * from.row + row * from.col], hermitian);
            } else if (lower ? row > col : row < col) factor = one;
            column[row * to.row] = factor;
            block[row * at.row] = diagonal;
        }
        __syncthreads();
        if (thread == 0) {
            if (lower) {
                for (Int row = last; row >= 0; row -= pivots[row] < 0 ? 2 : 1) {
                    const Int other = abs(pivots[row]) - 1;
                    if (other != row) exchange(column + row * to.row, column + other * to.row);
                }
            } else {
                for (Int row = first; row < n; row += pivots[row] < 0 ? 2 : 1) {
                    const Int other = abs(pivots[row]) - 1;
                    if (other != row) exchange(column + row * to.row, column + other * to.row);
                }
            }
        }
        if (thread == 32 && col == 0) {
            Int* order = every_order + number * n;
            for (Int row = 0; row < n; row++) order[row] = row;
            if (lower) {
                for (Int row = 0; row < n; row++) {
                    row += pivots[row] < 0;  // its last row
                    exchange(order + row, order + abs(pivots[row]) - 1);
                }
            } else {
                for (Int row = n - 1; row >= 0; row--) {
                    row -= pivots[row] < 0;  // its first row
                    exchange(order + row, order + abs(pivots[row]) - 1);
                }
            }
        }
        __syncthreads();
    }
}
"""
