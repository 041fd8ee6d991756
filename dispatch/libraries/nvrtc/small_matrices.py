"""Kernels that factorize and solve small dense matrices, many at once: up to 64 rows, each matrix in one launch.

A thread has a row of the matrix, in registers while it is factorized; the threads of a matrix, a warp or two of them,
tell each other a line of it at each step through shared memory, and wait for nobody else. A matrix of up to 32 rows is
made 4, 8, 16 or 32, with ones on its diagonal: several share a block, and the smallest ones a warp. Rows stay where
they are when LAPACK would exchange them: each has a place, which changes. This file knows no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import C64, C128, F32, F64

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["MOST_ROWS", "SOURCES", "Variant", "width_of"]

MOST_ROWS = 64
WIDTHS = (4, 8, 16, 32, 64)  # rows and columns of what a matrix is made
COLUMNS = (1, 4, 16, 32)  # right sides that are solved for at once
WARP = 32
THREADS = {F32: 128, F64: 128, C64: 128, C128: 64}  # of a block, whose matrices then have shared memory enough
REALS = {F32: "float", F64: "double", C64: "float", C128: "double"}
ALIGNMENT = 16

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

# A column of A is told at each step: of A·Aᴴ's term each thread computes those of its row.
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
CHOLESKY_ALONE = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
cholesky(const Element* a, Element* out, int* info, Int batch, Strides from, Strides to, int n)
{
    const int lane = threadIdx.x % N, among = threadIdx.x / N;
    const Int number = (Int)blockIdx.x * (THREADS / N) + among;
    if (number >= batch) return;
    Room& room = ((Room*)memory)[among];
    load(room, a + number * from.batch, from, lane, n, true, false);
    together();
    const int status = decompose(room, lane, n);
    together();
    store(room, out + number * to.batch, to, lane, n, status != 0);
    if (lane == 0) info[number] = status;
}
"""
SOURCES = {"cholesky": COMMON + CHOLESKY + CHOLESKY_ALONE}


def width_of(n: int) -> int:
    """What a matrix of so many rows is made."""
    return next(width for width in WIDTHS if n <= width)


def columns_of(count: int) -> int:
    """How many of so many right sides are solved for at once."""
    return next((columns for columns in COLUMNS if count <= columns), COLUMNS[-1])


class Variant(NamedTuple):
    """A kernel: its function, the elements' dtype, how many rows a matrix is made, and right sides at once."""

    function: str
    dtype: Dtype
    width: int
    columns: int = 1
    defines: tuple[tuple[str, int], ...] = ()

    @property
    def source(self) -> str:
        return SOURCES[self.function]

    @property
    def threads(self) -> int:
        """Those of a block."""
        return max(self.width, THREADS[self.dtype]) if self.width <= WARP else self.width

    @property
    def matrices(self) -> int:
        """Those of a block."""
        return self.threads // self.width

    @property
    def room(self) -> int:
        """Bytes of shared memory for a matrix."""
        line, size = max(self.width, self.columns), self.dtype.itemsize
        elements = 2 * line + self.width * (self.width + 1)
        numbers = self.width + 16
        return -(-(elements * size + numbers * 4) // ALIGNMENT) * ALIGNMENT

    @property
    def shared(self) -> int:
        """Bytes of shared memory for a block."""
        return self.room * self.matrices

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's, but for the architecture."""
        chosen = {
            "REAL": REALS[self.dtype],
            "PARTS": 2 if self.dtype.is_complex else 1,
            "N": self.width,
            "COLUMNS": self.columns,
            "THREADS": self.threads,
            "ROOM": self.room,
            **dict(self.defines),
        }
        return ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))
