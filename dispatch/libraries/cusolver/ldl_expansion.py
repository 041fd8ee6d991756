"""L, D and the order of rows from what LAPACK packs of L·D·Lᴴ, by a kernel of this library. It knows no request."""

from __future__ import annotations

__all__ = ["SOURCE"]

# A block of threads makes a column. What is eliminated last was exchanged last: a column takes part in the exchanges of
# its own block of D and of those that were eliminated before. Of two rows that are a block the pivots are negative; in
# a run of such, every second one begins a block.
SOURCE = r"""
typedef long long Int;
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct Strides { Int row, col, batch; };

__device__ Element conjugate(Element one, Int hermitian) {
    if (PARTS == 2 && hermitian) one.part[PARTS - 1] = -one.part[PARTS - 1];
    return one;
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
        Int before = 0;
        if (pivots[col] < 0)
            while (before < col && pivots[col - before - 1] < 0) before++;
        // The other row of the column's block of D, or the column's own.
        const Int partner = pivots[col] > 0 ? col : before % 2 ? col - 1 : col + 1;
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
