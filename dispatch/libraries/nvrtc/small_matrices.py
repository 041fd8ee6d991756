"""How kernels factorize small dense matrices: the parts in CUDA C++ that the kernels of small_kernels.py consist of.

A thread holds a row of the matrix, in registers during the factorization. The threads of a matrix, one or two warps,
exchange a line of it in each step through shared memory, and synchronize only with each other. A matrix of up to 32
rows is padded to 4, 8, 16 or 32 rows, with ones on its diagonal: several share a block, and the smallest ones a warp.
Rows are not moved when LAPACK would exchange them: each has a place, which changes.
"""

from __future__ import annotations

__all__ = ["CHOLESKY", "COMMON", "LU"]

COMMON = r"""
typedef long long Int;
enum {
    LAST = PARTS - 1,
    WARP = 32,
    STEP = N < 8 ? N : 8,  // columns that are done before all others move up in a thread's registers
    LINE = N > COLUMNS ? N : COLUMNS,
    WIDTH = sizeof(REAL) * PARTS < 16 ? 16 / (sizeof(REAL) * PARTS) : 1,
    DEPTH = N < 128 / (sizeof(REAL) * PARTS) ? N : 128 / (sizeof(REAL) * PARTS)  // elements that are read at once
};
struct __align__(sizeof(REAL) * PARTS) Element { REAL part[PARTS]; };
struct __align__(16) Pack { Element at[WIDTH]; };
struct Strides { Int row, col, batch; };
struct __align__(16) Room {
    Element line[2][LINE];  // what one thread tells the others, by turns, so that nobody waits for who still reads
    Element tile[N][N + 1];
    int where[N];  // the thread whose row has a place
    unsigned said[2][2][4];  // by each of two warps
};
static_assert(sizeof(Room) == ROOM, "");
extern __shared__ Pack memory[];

// All threads of a matrix have come here.
__device__ void together()
{
#if N > 32
    __syncthreads();
#else
    __syncwarp();
#endif
}

__device__ Int magnitude(Int x) { return x < 0 ? -x : x; }

// As LAPACK compares them: of complex numbers the sum of both parts' magnitudes.
__device__ REAL size_of(Element x)
{
    const REAL real = fabs(x.part[0]);
    return PARTS == 1 ? real : real + fabs(x.part[LAST]);
}

__device__ Element number(REAL real)
{
    Element x = {};
    x.part[0] = real;
    return x;
}

__device__ Element conjugate(Element x)
{
    if (PARTS == 2) x.part[LAST] = -x.part[LAST];
    return x;
}

__device__ Element product(Element x, Element y)
{
    Element z;
    z.part[0] = x.part[0] * y.part[0];
    if (PARTS == 2) {
        z.part[0] = fma(-x.part[LAST], y.part[LAST], z.part[0]);
        z.part[LAST] = fma(x.part[0], y.part[LAST], x.part[LAST] * y.part[0]);
    }
    return z;
}

// x -= y·z
__device__ void subtract(Element& x, Element y, Element z)
{
    x.part[0] = fma(-y.part[0], z.part[0], x.part[0]);
    if (PARTS == 2) {
        x.part[0] = fma(y.part[LAST], z.part[LAST], x.part[0]);
        x.part[LAST] = fma(-y.part[0], z.part[LAST], x.part[LAST]);
        x.part[LAST] = fma(-y.part[LAST], z.part[0], x.part[LAST]);
    }
}

// A complex divisor is made about 1 by a power of 2, so that no square overflows.
__device__ Element quotient(Element x, Element y)
{
    if (PARTS == 1) {
        x.part[0] /= y.part[0];
        return x;
    }
    const int most = sizeof(REAL) == 4 ? 126 : 1022;
    int exponent = ilogb(size_of(y));
    exponent = exponent < -most ? -most : exponent > most ? most : exponent;
    const REAL scale = scalbn(REAL(1), -exponent);
    for (int part = 0; part < PARTS; ++part) {
        x.part[part] *= scale;
        y.part[part] *= scale;
    }
    const REAL square = fma(y.part[0], y.part[0], y.part[LAST] * y.part[LAST]);
    Element z = product(x, conjugate(y));
    for (int part = 0; part < PARTS; ++part) z.part[part] /= square;
    return z;
}

// The matrix into the tile, ones on the diagonal beyond its end: neighbours in memory by neighbouring threads. Of a
// Hermitian one the lower triangle alone is read, and zeros are above it.
__device__ void load(Room& room, const Element* from, Strides at, int lane, int n, bool is_half, bool conjugated)
{
    const bool by_rows = magnitude(at.col) < magnitude(at.row);
    const Int beside = by_rows ? at.col : at.row, further = by_rows ? at.row : at.col;
#pragma unroll 1
    for (int first = 0; first < N; first += DEPTH) {
        Element held[DEPTH];
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int other = first + s, row = by_rows ? other : lane, col = by_rows ? lane : other;
            held[s] = number(row == col);
            if (lane < n && other < n && (!is_half || row >= col)) held[s] = from[lane * beside + other * further];
        }
#pragma unroll
        for (int s = 0; s < DEPTH; ++s) {
            const int other = first + s, row = by_rows ? other : lane, col = by_rows ? lane : other;
            room.tile[row][col] = conjugated ? conjugate(held[s]) : held[s];
        }
    }
}

// The tile, its rows in their places, to where it is wanted; NaN where there is none.
__device__ void store(Room& room, Element* to, Strides at, int lane, int n, bool is_nan)
{
    const bool by_rows = magnitude(at.col) < magnitude(at.row);
    const Int beside = by_rows ? at.col : at.row, further = by_rows ? at.row : at.col;
    Element none;
    for (int part = 0; part < PARTS; ++part) none.part[part] = __int_as_float(0x7fffffff);
    if (lane < n)
        for (int other = 0; other < n; ++other) {
            const int row = by_rows ? other : lane, col = by_rows ? lane : other;
            to[lane * beside + other * further] = is_nan ? none : room.tile[room.where[row]][col];
        }
}

// Elements of a thread become a line for all.
template <int COUNT> __device__ void tell(Element* line, const Element* x)
{
    if (COUNT % WIDTH) {
        for (int c = 0; c < COUNT; ++c) line[c] = x[c];
        return;
    }
#pragma unroll
    for (int c = 0; c < COUNT; c += WIDTH) {
        Pack pack;
        for (int e = 0; e < WIDTH; ++e) pack.at[e] = x[(c + e) % COUNT];
        *(Pack*)(line + c) = pack;
    }
}
"""

# In each step a column of A is shared: each thread computes the elements of A·Aᴴ's term in its row.
CHOLESKY = r"""
// Give the order of the first leading minor that is not positive definite, or 0.
__device__ int decompose(Room& room, int lane, int n)
{
    Element a[N];
    int status = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) a[j] = room.tile[lane][j];
#pragma unroll 1
    for (int first = 0; first < n; first += STEP) {
#pragma unroll
        for (int s = 0; s < STEP; ++s) {
            const int k = first + s;
            if (k < n) {
                Element* line = room.line[k & 1];
                line[lane] = a[s];
                together();
                const REAL square = line[k].part[0];
                if (!(square > 0) && !status) status = k + 1;
                const REAL root = sqrt(square), inverse = 1 / root;
                Element factor;
                for (int part = 0; part < PARTS; ++part) {
                    a[s].part[part] *= inverse;
                    factor.part[part] = a[s].part[part] * inverse;
                }
                if (lane == k) a[s] = number(root);
#pragma unroll
                for (int group = 0; group < N; group += STEP)
                    if (first + group < n) {
#pragma unroll
                        for (int j = group; j < group + STEP; j += WIDTH)
                            if (j + WIDTH - 1 > s) {
                                const Pack pack = *(const Pack*)(line + first + j);
#pragma unroll
                                for (int e = 0; e < WIDTH; ++e)
                                    if (j + e > s) subtract(a[j + e], factor, conjugate(pack.at[e]));
                            }
                    }
            }
        }
#pragma unroll
        for (int s = 0; s < STEP; ++s) room.tile[lane][first + s] = lane < first + s ? number(0) : a[s];
#pragma unroll
        for (int j = 0; j + STEP < N; ++j) a[j] = a[j + STEP];
    }
    room.where[lane] = lane;
    return status;
}
"""
# In each step a row is shared: the one that LAPACK would exchange into the step's place.
LU = r"""
__device__ unsigned most(unsigned x)
{
#if N >= 32 && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800)
    return __reduce_max_sync(~0u, x);
#else
#pragma unroll
    for (unsigned other = (N < WARP ? N : WARP) / 2; other; other /= 2) {
        const unsigned y = __shfl_xor_sync(~0u, x, other);
        x = x > y ? x : y;
    }
    return x;
#endif
}

// The place from k on with the largest element, the first of equals. Bits are compared, of which NaN's are the largest.
__device__ int choose(Room& room, Element x, int place, int k)
{
    const REAL size = place < k ? REAL(0) : size_of(x);
    unsigned high, low = 0;
    if (sizeof(REAL) == 8) {
        const unsigned long long bits = __double_as_longlong(size);
        high = (unsigned)(bits >> 32);
        low = (unsigned)bits;
    } else high = __float_as_uint(size);
    unsigned top = most(high), rest = 0;
    if (sizeof(REAL) == 8) rest = most(high == top ? low : 0);
    unsigned first = ~most(~(place >= k && high == top && low == rest ? (unsigned)place : (unsigned)N));
#if N > 32
    unsigned* mine = room.said[k & 1][threadIdx.x / WARP];
    if (threadIdx.x % WARP == 0) {
        mine[0] = top;
        mine[1] = rest;
        mine[2] = first;
    }
    __syncthreads();
    const unsigned *one = room.said[k & 1][0], *two = room.said[k & 1][1];
    const bool is_second = one[0] != two[0] ? one[0] < two[0] : one[1] != two[1] ? one[1] < two[1] : one[2] > two[2];
    first = is_second ? two[2] : one[2];
#endif
    return (int)first;
}

// P·A = L·U over the tile. Give the first zero on U's diagonal, counted from 1, or 0; `place` is that of this thread's
// row, `pivot` what was exchanged with the row of its number, and `swaps` how many exchanges there were.
__device__ int eliminate(Room& room, int lane, int n, int& place, int& pivot, int& swaps)
{
    Element a[N];
    int status = 0;
    place = lane;
    pivot = swaps = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) a[j] = room.tile[lane][j];
#pragma unroll 1
    for (int first = 0; first < n; first += STEP) {
#pragma unroll
        for (int s = 0; s < STEP; ++s) {
            const int k = first + s;
            if (k < n) {
                const int chosen = choose(room, a[s], place, k);
                if (lane == k) pivot = chosen + 1;
                swaps += chosen != k;
                Element* line = room.line[k & 1];
                if (place == chosen) {
                    tell<N>(line, a);
                    place = k;
                } else if (place == k) place = chosen;
                together();
                const Element top = line[s];
                if (size_of(top) == 0) {  // all below it is 0, too
                    if (!status) status = k + 1;
                } else if (place > k) {
                    const Element factor = a[s] = quotient(a[s], top);
#pragma unroll
                    for (int group = 0; group < N; group += STEP)
                        if (first + group < n) {
#pragma unroll
                            for (int j = group; j < group + STEP; j += WIDTH)
                                if (j + WIDTH - 1 > s) {
                                    const Pack pack = *(const Pack*)(line + j);
#pragma unroll
                                    for (int e = 0; e < WIDTH; ++e)
                                        if (j + e > s) subtract(a[j + e], factor, pack.at[e]);
                                }
                        }
                }
            }
        }
#pragma unroll
        for (int s = 0; s < STEP; ++s) room.tile[lane][first + s] = a[s];
#pragma unroll
        for (int j = 0; j + STEP < N; ++j) a[j] = a[j + STEP];
    }
    room.where[place] = lane;
    return status;
}
"""
