"""Kernels for batches of small dense matrices of up to 64 rows: factors, systems and inverses in one launch.

small_matrices.py describes the algorithm. This file knows no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.nvrtc.small_matrices import CHOLESKY, COMMON, LU

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["COLUMNS", "MAX_ROWS", "SOURCES", "WIDTHS", "Variant", "columns_of", "width_of"]

MAX_ROWS = 64
WIDTHS = (4, 8, 16, 32, 64)  # rows and columns that matrices are padded to
COLUMNS = (1, 4, 16, 32)  # right-hand sides that are solved for at once
WARP = 32
THREADS = {F32: 128, F64: 128, C64: 128, C128: 64}  # of a block; then its matrices have enough shared memory
REALS = {F32: "float", F64: "double", C64: "float", C128: "double"}
ALIGNMENT = 16

# Triangular solves with the tile, with COLUMNS right-hand sides in each thread's registers: those of its row's place.
SUBSTITUTION = r"""
// The reciprocal of a diagonal element, of which neither it nor a product with it overflows without need.
struct Divisor { Element inverse; REAL scale; };

__device__ Divisor divisor_of(Element x)
{
    const int low = sizeof(REAL) == 4 ? 100 : 1000, by = sizeof(REAL) == 4 ? 64 : 200;
    const REAL size = size_of(x);
    Divisor made;
    made.scale = size < scalbn(REAL(1), -low) ? scalbn(REAL(1), by)
               : size > scalbn(REAL(1), low) ? scalbn(REAL(1), -by) : REAL(1);
    for (int part = 0; part < PARTS; ++part) x.part[part] *= made.scale;
    made.inverse = quotient(number(1), x);
    return made;
}

// Solve with a triangle, from its last row up or from its first one down; ACROSS is with the transposed one. `row` is
// where the tile has this thread's row.
template <bool UP, bool UNIT, bool ACROSS>
__device__ void substitute(Room& room, Element* x, int row, int place, int n, bool conjugated)
{
    Divisor divisor = {};
    if (!UNIT) divisor = divisor_of(room.tile[row][place]);
    if (conjugated) divisor.inverse = conjugate(divisor.inverse);
    together();
#pragma unroll 1
    for (int step = 0; step < n; ++step) {
        const int k = UP ? n - 1 - step : step;
        Element* line = room.line[k & 1];
        Element factor = ACROSS ? room.tile[k][place] : room.tile[row][k];
        if (conjugated) factor = conjugate(factor);
        if (place == k) {
            if (!UNIT)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    for (int part = 0; part < PARTS; ++part) x[c].part[part] *= divisor.scale;
                    x[c] = product(x[c], divisor.inverse);
                }
            tell<COLUMNS>(line, x);
        }
        together();
        if (UP ? place < k : place > k) {
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) subtract(x[c], factor, line[c]);
        }
    }
}

// A thread's row of right sides from one on; without any, of the identity.
__device__ void take(Element* x, const Element* b, Strides at, int row, int n, int first, int columns)
{
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
        x[c] = number(!b && row == first + c);
        if (b && row < n && first + c < columns) x[c] = b[row * at.row + (first + c) * at.col];
    }
}

__device__ void give(const Element* x, Element* out, Strides at, int row, int n, int first, int columns, bool is_nan)
{
    Element none;
    for (int part = 0; part < PARTS; ++part) none.part[part] = __int_as_float(0x7fffffff);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
        if (row < n && first + c < columns) out[row * at.row + (first + c) * at.col] = is_nan ? none : x[c];
}
"""
BEGIN = r"""
    const int lane = threadIdx.x % N, among = threadIdx.x / N;
    const Int number = (Int)blockIdx.x * (THREADS / N) + among;
    if (number >= batch) return;
    Room& room = ((Room*)memory)[among];
"""
CHOLESKY_ALONE = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
cholesky(const Element* a, Element* out, int* info, Int batch, Strides from, Strides to, int n)
{
    BEGIN
    load(room, a + number * from.batch, from, lane, n, true, false);
    together();
    const int status = decompose(room, lane, n);
    together();
    store(room, out + number * to.batch, to, lane, n, status != 0);
    if (lane == 0) info[number] = status;
}
"""
LU_ALONE = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
lu_factor(const Element* a, Element* out, Int* pivots, int* info, Int batch, Strides from, Strides to, int n)
{
    BEGIN
    load(room, a + number * from.batch, from, lane, n, false, false);
    together();
    int place, pivot, swaps;
    const int status = eliminate(room, lane, n, place, pivot, swaps);
    together();
    store(room, out + number * to.batch, to, lane, n, false);
    if (lane < n) pivots[number * n + lane] = pivot;
    if (lane == 0) info[number] = status;
}
"""
GENERAL = r"""
// x of A·x = b, or the inverse where no b is given.
__device__ void solve_one(Room& room, const Element* a, const Element* b, Element* out, int* info,
    Strides from, Strides right, Strides to, int lane, int n, int columns)
{
    load(room, a, from, lane, n, false, false);
    together();
    int place, pivot, swaps;
    const int status = eliminate(room, lane, n, place, pivot, swaps);
    for (int first = 0; first < columns; first += COLUMNS) {
        Element x[COLUMNS];
        take(x, b, right, lane, n, first, columns);
        substitute<false, true, false>(room, x, lane, place, n, false);
        substitute<true, false, false>(room, x, lane, place, n, false);
        give(x, out, to, place, n, first, columns, status != 0);
    }
    if (lane == 0) *info = status;
}
"""
SOLVE = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
solve(const Element* a, const Element* b, Element* out, int* info,
    Int batch, Strides from, Strides right, Strides to, int n, int columns)
{
    BEGIN
    b += number * right.batch;
    out += number * to.batch;
    solve_one(room, a + number * from.batch, b, out, info + number, from, right, to, lane, n, columns);
}
"""
INVERSE = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
inverse(const Element* a, Element* out, int* info, Int batch, Strides from, Strides to, int n)
{
    BEGIN
    out += number * to.batch;
    solve_one(room, a + number * from.batch, nullptr, out, info + number, from, to, to, lane, n, n);
}
"""
POSITIVE = r"""
// x of A·x = b, where A = L·Lᴴ is factorized.
__device__ void solve_both(Room& room, const Element* b, Element* out, Strides right, Strides to, int lane, int n,
    int columns, bool is_nan)
{
    for (int first = 0; first < columns; first += COLUMNS) {
        Element x[COLUMNS];
        take(x, b, right, lane, n, first, columns);
        substitute<false, false, false>(room, x, lane, lane, n, false);
        substitute<true, false, true>(room, x, lane, lane, n, true);
        give(x, out, to, lane, n, first, columns, is_nan);
    }
}
"""
SOLVE_POSITIVE = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
solve_positive(const Element* a, const Element* b, Element* out, int* info,
    Int batch, Strides from, Strides right, Strides to, int n, int columns, int conjugated)
{
    BEGIN
    load(room, a + number * from.batch, from, lane, n, true, conjugated);
    together();
    const int status = decompose(room, lane, n);
    b += number * right.batch;
    solve_both(room, b, out + number * to.batch, right, to, lane, n, columns, status != 0);
    if (lane == 0) info[number] = status;
}
"""
OF_CHOLESKY = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
cho_solve(const Element* c, const Element* b, Element* out,
    Int batch, Strides from, Strides right, Strides to, int n, int columns, int conjugated)
{
    BEGIN
    load(room, c + number * from.batch, from, lane, n, true, conjugated);
    together();
    solve_both(room, b + number * right.batch, out + number * to.batch, right, to, lane, n, columns, false);
}
"""
# Each thread tracks the place of a row of A through all exchanges. For A, the rows of b are moved there; for the
# transposed matrix, those of the solution are moved back.
OF_LU = r"""
extern "C" __global__ void __launch_bounds__(THREADS, 1)
lu_solve(const Element* lu, const Int* pivots, const Element* b, Element* out,
    Int batch, Strides from, Strides right, Strides to, int n, int columns, int trans)
{
    BEGIN
    load(room, lu + number * from.batch, from, lane, n, false, false);
    int place = lane;
    for (int k = 0; k < n; ++k) {
        const int pivot = (int)pivots[number * n + k] - 1;
        place = place == k ? pivot : place == pivot ? k : place;
    }
    together();
    for (int first = 0; first < columns; first += COLUMNS) {
        Element x[COLUMNS];
        take(x, b + number * right.batch, right, trans ? place : lane, n, first, columns);
        if (trans) {
            substitute<false, false, true>(room, x, place, place, n, trans == 2);
            substitute<true, true, true>(room, x, place, place, n, trans == 2);
        } else {
            substitute<false, true, false>(room, x, place, place, n, false);
            substitute<true, false, false>(room, x, place, place, n, false);
        }
        give(x, out + number * to.batch, to, trans ? lane : place, n, first, columns, false);
    }
}
"""
PARTS = {
    "cholesky": (CHOLESKY, CHOLESKY_ALONE),
    "lu_factor": (LU, LU_ALONE),
    "solve": (LU, SUBSTITUTION, GENERAL, SOLVE),
    "inverse": (LU, SUBSTITUTION, GENERAL, INVERSE),
    "solve_positive": (CHOLESKY, SUBSTITUTION, POSITIVE, SOLVE_POSITIVE),
    "cho_solve": (SUBSTITUTION, POSITIVE, OF_CHOLESKY),
    "lu_solve": (SUBSTITUTION, OF_LU),
}
SOURCES = {name: "".join((COMMON, *parts)).replace("    BEGIN\n", BEGIN.lstrip("\n")) for name, parts in PARTS.items()}


def width_of(n: int) -> int:
    """The padded size of a matrix of `n` rows."""
    return next(width for width in WIDTHS if n <= width)


def columns_of(count: int) -> int:
    """The number of right-hand sides that are solved for at once."""
    return next((columns for columns in COLUMNS if count <= columns), COLUMNS[-1])


class Variant(NamedTuple):
    """A kernel: its function, the elements' dtype, the padded number of rows, and the right-hand sides at once."""

    function: str
    dtype: Dtype
    width: int
    columns: int = 1

    @property
    def source(self) -> str:
        return SOURCES[self.function]

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return max(self.width, THREADS[self.dtype]) if self.width <= WARP else self.width

    @property
    def matrices(self) -> int:
        """The matrices of a block."""
        return self.threads // self.width

    @property
    def room(self) -> int:
        """The bytes of shared memory for a matrix."""
        line, size = max(self.width, self.columns), self.dtype.itemsize
        elements = 2 * line + self.width * (self.width + 1)
        numbers = self.width + 16
        return -(-(elements * size + numbers * 4) // ALIGNMENT) * ALIGNMENT

    @property
    def shared(self) -> int:
        """The bytes of shared memory for a block."""
        return self.room * self.matrices

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options, except the architecture."""
        chosen = {
            "REAL": REALS[self.dtype],
            "PARTS": 2 if self.dtype.is_complex else 1,
            "N": self.width,
            "COLUMNS": self.columns,
            "THREADS": self.threads,
            "ROOM": self.room,
        }
        return ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))
