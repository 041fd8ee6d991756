"""The kernel that inverts the diagonal blocks of a sparse matrix, in CUDA C++.

Each matrix block is in shared memory, and is processed by as many threads as it has rows, rounded up to a power of 2; a
thread block processes several matrix blocks. A thread reads its own line of the matrix and adds up the elements within
the matrix block, so that duplicates are added in a fixed order. Gauss-Jordan elimination with row pivoting then inverts
in place; before it, rows and then columns are scaled by powers of 2 until their largest elements are between 1 and 2.
The norms of the scaled block and of its inverse determine whether it is singular, whatever the units of its rows: for a
singular block roundoff produces an inverse whose norm is the reciprocal of the precision. The absolute value of a
symmetric block is computed by Jacobi rotations of all disjoint pairs at once.

Follows Golub and Van Loan, Matrix Computations, 3.4 and 8.5 (the order of pairs is the tournament ordering of 8.5.6),
and LAPACK's GEEQU and GESVX (the scaling, and the reciprocal condition number).
"""

from __future__ import annotations

from dispatch.ops.sparse.wide_numbers import ARITHMETIC

__all__ = ["NAME", "SOURCE"]

NAME = "invert_blocks"

SOURCE = (
    ARITHMETIC
    + r"""
enum { CSR = 1, CSC = 2, COO = 3, BSR = 6 };
enum { GROUPS = THREADS / LANES, PITCH = LANES + 1, SWEEPS = 40 };
#define AT(i, j) block[(i) * PITCH + (j)]
#define SINGULAR 0x1p-50  // the reciprocal of the condition from which on roundoff makes all of an inverse

struct Blocks {
    Int n, count, elements, base;             // count: of blocks
    Int block_step, row_step, column_step;    // of the result, in elements
    int size, high, wide;                     // rows of a block; of BSR, rows and columns of one of the matrix's
};

__device__ double magnitude(Wide a)
{
#if PARTS == 2
    const double x = fabs(a.x), y = fabs(a.y);
    return x > y || x != x ? x : y;
#else
    return fabs(a);
#endif
}

__device__ Wide shifted(Wide a, int by)
{
#if PARTS == 2
    Wide made = {scalbn(a.x, by), scalbn(a.y, by)};
    return made;
#else
    return scalbn(a, by);
#endif
}

__device__ bool is_whole(Element a)
{
#if PARTS == 2
    return is_finite(a.x) && is_finite(a.y);
#else
    return is_finite(a);
#endif
}

// Add an element of the matrix, if it is in the block whose first row is `first`.
__device__ void add(Wide* block, int lane, Int minor, Int first, int extent, Element value)
{
    const Int other = minor - first;
    if (other < 0 || other >= extent) return;
    Wide& at = FORMAT == CSC ? AT(other, lane) : AT(lane, other);
    at = at + wide(value);
}

// Add the elements of line first + lane: a row, or of CSC a column.
__device__ void read_line(
    Wide* block, int lane, Int first, int extent, const Element* values, const ROW* rows, const COLUMN* columns,
    const Blocks& s)
{
    const Int line = first + lane;
    if (FORMAT == COO) {
        Int low = 0, high = s.elements;
        while (low < high) {
            const Int middle = (low + high) / 2;
            if ((Int)rows[middle] - s.base < line) low = middle + 1; else high = middle;
        }
        for (Int k = low; k < s.elements && (Int)rows[k] - s.base == line; ++k)
            add(block, lane, (Int)columns[k] - s.base, first, extent, values[k]);
    } else if (FORMAT == BSR) {
        const Int whole = line / s.high, inner = line % s.high;
        for (Int k = (Int)rows[whole] - s.base; k < (Int)rows[whole + 1] - s.base; ++k) {
            const Int column = ((Int)columns[k] - s.base) * s.wide;
            if (column + s.wide <= first || column >= first + extent) continue;
            for (int j = 0; j < s.wide; ++j)
                add(block, lane, column + j, first, extent, values[(k * s.high + inner) * s.wide + j]);
        }
    } else if (FORMAT == CSC) {
        for (Int k = (Int)columns[line] - s.base; k < (Int)columns[line + 1] - s.base; ++k)
            add(block, lane, (Int)rows[k] - s.base, first, extent, values[k]);
    } else {
        for (Int k = (Int)rows[line] - s.base; k < (Int)rows[line + 1] - s.base; ++k)
            add(block, lane, (Int)columns[k] - s.base, first, extent, values[k]);
    }
}

// The largest number that a thread of a group has, and the first thread that has it.
__device__ double largest_of(double mine, int& lane)
{
    for (int with = LANES / 2; with; with /= 2) {
        const double candidate = __shfl_xor_sync(~0u, mine, with);
        const int other = int(__shfl_xor_sync(~0u, unsigned(lane), with));
        if (candidate > mine || (candidate == mine && other < lane)) {
            mine = candidate;
            lane = other;
        }
    }
    return mine;
}

#if ABSOLUTE
// Pair r of a step: of `even` numbers each meets each other one once in even - 1 steps.
__device__ void pair(int step, int r, int even, int& p, int& q)
{
    const int others = even - 1, a = (step + r) % others, b = r ? (step - r + others) % others : others;
    p = a < b ? a : b;
    q = a < b ? b : a;
}

// |B|⁻¹ of a symmetric block whose elements are at most 2: V·|Λ|⁻¹·Vᵀ. Returns whether no eigenvalue is 0 beside the
// largest. All threads of a block of threads come here.
__device__ bool invert(double* block, double* vectors, double* turns, int* go_on, int lane, int size, bool works)
{
    const int even = size + size % 2;
    for (int j = 0; works && lane < size && j < size; ++j) {
        vectors[lane * PITCH + j] = lane == j;
        if (j < lane) AT(lane, j) = AT(j, lane) = (AT(lane, j) + AT(j, lane)) / 2;
    }
    __syncthreads();
    for (int sweep = 0; sweep < SWEEPS; ++sweep) {
        if (threadIdx.x == 0) *go_on = 0;
        __syncthreads();
        for (int step = 0; step < even - 1; ++step) {
            int p, q;
            if (lane < even / 2) {
                pair(step, lane, even, p, q);
                double cosine = 1, sine = 0;
                if (works && q < size && fabs(AT(p, q)) > 0x1p-54) {
                    const double theta = (AT(q, q) - AT(p, p)) / (2 * AT(p, q));
                    const double tangent = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1));
                    cosine = 1 / sqrt(tangent * tangent + 1);
                    sine = tangent * cosine;
                    *go_on = 1;
                }
                turns[2 * lane] = cosine;
                turns[2 * lane + 1] = sine;
            }
            __syncthreads();
            for (int r = 0; works && lane < size && r < even / 2; ++r) {
                pair(step, r, even, p, q);
                if (q >= size) continue;
                const double cosine = turns[2 * r], sine = turns[2 * r + 1];
                const double x = AT(lane, p), y = AT(lane, q);
                AT(lane, p) = cosine * x - sine * y;
                AT(lane, q) = sine * x + cosine * y;
                const double v = vectors[lane * PITCH + p], w = vectors[lane * PITCH + q];
                vectors[lane * PITCH + p] = cosine * v - sine * w;
                vectors[lane * PITCH + q] = sine * v + cosine * w;
            }
            __syncthreads();
            for (int r = 0; works && lane < size && r < even / 2; ++r) {
                pair(step, r, even, p, q);
                if (q >= size) continue;
                const double cosine = turns[2 * r], sine = turns[2 * r + 1];
                const double x = AT(p, lane), y = AT(q, lane);
                AT(p, lane) = lane == q && sine != 0 ? 0 : cosine * x - sine * y;
                AT(q, lane) = lane == p && sine != 0 ? 0 : sine * x + cosine * y;
            }
            __syncthreads();
        }
        const bool is_done = !*go_on;
        __syncthreads();
        if (is_done) break;
    }
    int unused = lane;
    const double mine = works && lane < size ? fabs(AT(lane, lane)) : 0;
    const double most = largest_of(mine, unused);
    unused = lane;
    const double least = -largest_of(works && lane < size ? -mine : -most, unused);
    const bool is_regular = works && least > size * SINGULAR * most;
    turns[lane] = is_regular && lane < size ? 1 / mine : 0;
    __syncthreads();
    for (int j = 0; is_regular && lane < size && j < size; ++j) {
        double sum = 0;
        for (int k = 0; k < size; ++k) sum += vectors[lane * PITCH + k] * vectors[j * PITCH + k] * turns[k];
        AT(lane, j) = sum;
    }
    return is_regular;
}
#else
// The largest sum of magnitudes of a row of a block.
__device__ double norm_of(const Wide* block, int lane, int extent)
{
    double sum = 0;
    for (int j = 0; lane < extent && j < extent; ++j) sum += magnitude(AT(lane, j));
    return largest_of(sum, lane);
}

// The inverse of a block, in place. Returns whether there was a pivot other than 0 for each row. All threads of a block
// of threads come here.
__device__ bool invert(Wide* block, int* order, int lane, int size, bool works)
{
    for (int k = 0; k < size; ++k) {
        int pivot = lane;
        const double most = largest_of(lane >= k && lane < size ? magnitude(AT(lane, k)) : -1.0, pivot);
        works = works && most > 0;
        if (works && lane < size) {
            if (lane == 0) order[k] = pivot;
            const Wide here = AT(k, lane);
            AT(k, lane) = AT(pivot, lane);
            AT(pivot, lane) = here;
        }
        __syncthreads();
        const Wide by = works ? wide(1.0) / AT(k, k) : wide(0.0);
        if (works && lane < size && lane != k) {
            const Wide factor = AT(lane, k) * by;
            for (int j = 0; j < size; ++j)
                if (j != k) AT(lane, j) = AT(lane, j) - factor * AT(k, j);
            AT(lane, k) = wide(0.0) - factor;
        }
        __syncthreads();
        if (works && lane < size) AT(k, lane) = lane == k ? by : AT(k, lane) * by;
        __syncthreads();
    }
    for (int k = size - 1; works && lane < size && k >= 0; --k) {
        const Wide here = AT(lane, k);
        AT(lane, k) = AT(lane, order[k]);
        AT(lane, order[k]) = here;
    }
    return works;
}
#endif

// Note that a block has no inverse, if none before it is noted.
__device__ void note(int* info, int number)
{
    int seen = 0;
    while (seen == 0 || seen > number) {
        const int old = atomicCAS(info, seen, number);
        if (old == seen) return;
        seen = old;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) invert_blocks(
    const Element* values, const ROW* rows, const COLUMN* columns, Element* out, int* info, Blocks s)
{
    __shared__ Wide elements[GROUPS][LANES * PITCH];
    __shared__ int powers[GROUPS][2][LANES];  // by which rows and columns are scaled
    __shared__ int flawed[GROUPS];
#if ABSOLUTE
    __shared__ double vectors[GROUPS][LANES * PITCH], turns[GROUPS][2 * LANES];
    __shared__ int go_on;
#else
    __shared__ int orders[GROUPS][LANES];
#endif
    const int group = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const Int number = (Int)blockIdx.x * GROUPS + group, first = number * s.size;
    const bool is_there = number < s.count;
    const int extent = !is_there ? 0 : int(s.n - first < s.size ? s.n - first : s.size);
    Wide* block = elements[group];
    int *by_row = powers[group][0], *by_column = powers[group][1];

    // What a block lacks of its size is the unit matrix.
    for (int j = 0; j < LANES; ++j) AT(lane, j) = wide(lane == j && lane >= extent ? 1.0 : 0.0);
    if (lane == 0) flawed[group] = 0;
    __syncthreads();
    if (lane < extent) read_line(block, lane, first, extent, values, rows, columns, s);
    __syncthreads();

    double most = 0;
    for (int j = 0; j < extent; ++j) {
        if (lane >= extent) break;
        const double here = magnitude(AT(lane, j));
        if (!is_finite(here)) flawed[group] = 1;
        most = here > most ? here : most;
    }
#if ABSOLUTE
    int unused = lane;
    most = largest_of(most, unused);
#endif
    if (lane < extent && most == 0) flawed[group] = 1;
    by_row[lane] = lane < extent && most > 0 && is_finite(most) ? -ilogb(most) : 0;
    by_column[lane] = 0;
    for (int j = 0; j < extent && lane < extent; ++j) AT(lane, j) = shifted(AT(lane, j), by_row[lane]);
    __syncthreads();
#if ABSOLUTE
    const bool is_regular = invert(block, vectors[group], turns[group], &go_on, lane, s.size, !flawed[group]);
#else
    most = 0;
    for (int i = 0; i < extent && lane < extent; ++i) {
        const double here = magnitude(AT(i, lane));
        most = here > most ? here : most;
    }
    if (lane < extent && most == 0) flawed[group] = 1;
    by_column[lane] = lane < extent && most > 0 && is_finite(most) ? -ilogb(most) : 0;
    for (int i = 0; i < extent && lane < extent; ++i) AT(i, lane) = shifted(AT(i, lane), by_column[lane]);
    __syncthreads();
    const double norm = norm_of(block, lane, extent);
    const bool has_pivots = invert(block, orders[group], lane, s.size, !flawed[group]);
    const double condition = norm * norm_of(block, lane, extent);  // all threads of a warp come here
    const bool is_regular = has_pivots && condition < 1 / SINGULAR;
#endif
    __syncthreads();

    // The inverse of what was scaled by rows is scaled by columns. One that the dtype cannot hold is none.
    for (int j = 0; is_regular && j < extent && lane < extent; ++j) {
        const int by = ABSOLUTE ? by_row[lane] : by_column[lane] + by_row[j];
        AT(lane, j) = shifted(AT(lane, j), by);
        if (!is_whole(narrow(AT(lane, j)))) flawed[group] = 1;
    }
    __syncthreads();
    if (!is_there) return;
    const bool is_flawed = !is_regular || flawed[group];
    if (is_flawed && lane == 0) note(info, int(number) + 1);
    const double zero = 0, none = zero / zero;
    for (int j = 0; lane < s.size && j < s.size; ++j) {
        const bool is_inside = lane < extent && j < extent;
        const Wide found = !is_inside ? wide(0.0) : is_flawed ? whole(none) : AT(lane, j);
        out[number * s.block_step + lane * s.row_step + j * s.column_step] = narrow(found);
    }
}
"""
)
