"""The kernel of a matrix of blocks times a dense matrix, or of a batch, in CUDA C++: BSR of any blocks, not transposed.

A thread block computes a tile of C: the rows of one row of A's blocks, or MAX_HIGH of them, and some columns. Along
that row of blocks the columns of all blocks are numbered consecutively: in each step, STEP of these columns of A and
the matching rows of B are copied to shared memory, while those of the next step are loaded into registers. So blocks of
4 take as few steps as blocks of 32. Each thread adds up the products of some rows and columns, in the order of the
blocks; the bits of a result are the same in each run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["NAME", "SOURCE", "Read", "Tile", "blocks_of", "options", "tile_of"]

NAME = "multiply_blocks"
REAL = {C64: F32, C128: F64}
INDICES = {4: "int", 8: "long long"}  # by size in bytes
MAX_HIGH, MAX_WIDE = 64, 64  # of a tile of C
ENOUGH_THREADS = 128  # of a thread block, so that several warps hide the latency of loads
SHARES = ((4, 4), (4, 2), (2, 2), (2, 1))  # rows and columns of a thread: the first that leaves enough threads
LINE_BYTES = 16  # of the padding of lines in shared memory, which keeps vectors aligned
FEW_BLOCKS = 256  # thread blocks: fewer do not fill a GPU
MAX_THREADS = 1 << 17  # of a launch, up to which teams are added: about as many as a GPU runs at once
MAX_BLOCK = 512  # threads of a block, up to which teams are added
SHARED_BYTES = 47 << 10  # for the steps of all teams, of 48 KiB
STEP_BYTES = 4 * LINE_BYTES + 2 * 8  # of each step, beside A and B: padding and block columns


class Tile(NamedTuple):
    """How C is split.

    Attributes:
        high, wide: rows and columns of a thread block.
        rows, columns: those of a thread.
        step: columns of A in shared memory.
        teams: groups of threads, each of which computes every `teams`-th step; their sums are added at the end.
    """

    high: int
    wide: int
    rows: int
    columns: int
    step: int
    teams: int = 1

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return -(-self.high // self.rows) * (self.wide // self.columns) * self.teams


def tile_of(high: int, columns: int, item: int, lines: int, span: int) -> Tile:
    """The tile for blocks of `high` rows, a C of so many columns, and sums of `item` bytes.

    `lines` are the rows of blocks, of all products of a batch, and `span` the columns of all blocks of an average row.
    If there are too few tiles to fill a GPU, they are narrower, and have several teams.
    """
    tile = _tile(high, columns, item, MAX_WIDE)
    if blocks_of(lines, high, columns, tile) < FEW_BLOCKS:
        tile = _tile(high, columns, item, MAX_WIDE // 2)
    blocks = blocks_of(lines, high, columns, tile)
    while (
        2 * blocks * tile.threads <= MAX_THREADS
        and 2 * tile.threads <= MAX_BLOCK
        and 2 * tile.teams * tile.step <= span
        and 2 * tile.teams * tile.step * ((tile.high + tile.wide) * item + STEP_BYTES) <= SHARED_BYTES
    ):
        tile = tile._replace(teams=2 * tile.teams)
    return tile


def _tile(high: int, columns: int, item: int, wide: int) -> Tile:
    """The tile of at most `wide` columns, with one team."""
    rows = min(high, MAX_HIGH)
    while wide > 1 and wide >= 2 * columns:
        wide //= 2
    for share in (*SHARES, (1, 1)):
        if share[0] <= rows and share[1] <= wide:
            tile = Tile(rows, wide, *share, 16 if item > 8 else 32)
            if tile.threads >= ENOUGH_THREADS:
                break
    return tile


def blocks_of(lines: int, high: int, columns: int, tile: Tile) -> int:
    """The number of thread blocks, for so many rows of blocks."""
    return int(lines * -(-high // tile.high) * -(-columns // tile.wide))


SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;
typedef SPAN Span;  // of indices in one row of blocks
typedef REAL Real;
struct alignas(sizeof(STORED) * PARTS) Number { STORED part[PARTS]; };
struct alignas(sizeof(RESULT) * PARTS) Result { RESULT part[PARTS]; };
struct alignas(sizeof(Real) * PARTS) Sum { Real part[PARTS]; };
struct BatchStrides { Int values, offsets, places, b, c, out; };  // in elements from one matrix to the next
template <int COUNT> struct alignas(16) Line { Sum at[COUNT]; };  // so that a thread reads its vectors at once
const int LANES = TILE_WIDE / COLUMNS, LINES = (TILE_HIGH + ROWS - 1) / ROWS;
const int TEAM = LINES * LANES, THREADS = TEAM * TEAMS, STEPS = STEP * TEAMS;
const int A_LINE = LINES * ROWS + PAD, B_LINE = TILE_WIDE + PAD;
const int A_LOADS = (TILE_HIGH * STEP + TEAM - 1) / TEAM, B_LOADS = (TILE_WIDE * STEP + TEAM - 1) / TEAM;
const int STAGED = 2 * STEPS + 64;  // block columns in shared memory: those of two steps, which may divide a block
static_assert(TEAM * COLUMNS <= STEP * A_LINE, "a row of each thread's sums fits where A's columns were");

__device__ void add_product(Sum& sum, const Sum& x, const Sum& y)
{
    sum.part[0] = fma(x.part[0], y.part[0], sum.part[0]);
#if PARTS == 2
    sum.part[0] = fma(-x.part[1], y.part[1], sum.part[0]);
    sum.part[1] = fma(x.part[0], y.part[1], fma(x.part[1], y.part[0], sum.part[1]));
#endif
}

__device__ Sum times(const Sum& factor, const Sum& x)
{
#if PARTS == 2
    return {{factor.part[0] * x.part[0] - factor.part[1] * x.part[1],
             factor.part[0] * x.part[1] + factor.part[1] * x.part[0]}};
#else
    return {{factor.part[0] * x.part[0]}};
#endif
}

__device__ Sum as_sum(const Number& x)
{
    Sum sum;
    for (int i = 0; i < PARTS; ++i) sum.part[i] = read(x.part[i]);
    return sum;
}

// The rows and columns of B's part of a step are loaded in the order in which they are in memory.
__device__ int step_of(int load) { return B_BY_COLUMNS ? load % STEP : load / TILE_WIDE; }
__device__ int place_of(int load) { return B_BY_COLUMNS ? load / STEP : load % TILE_WIDE; }

// Blocks have HIGH rows and WIDE columns, one row after another. `parts`: the tiles of C's rows in a row of blocks;
// `tiles`: those of C's columns; `each`: the thread blocks of one product. Without `c` nothing is added.
extern "C" __global__ void __launch_bounds__(THREADS, THREADS < 512 ? 512 / THREADS : 1) multiply_blocks(
    const Number* __restrict__ values, const LINE* __restrict__ offsets, const PLACE* __restrict__ places,
    const Number* __restrict__ b, const Result* c, Result* out, Sum alpha, Sum beta, Int count, Int base, Int columns,
    Int b_row, Int b_column, Int c_row, Int c_column, Int out_row, Int out_column, int parts, int tiles, int each,
    BatchStrides strides)
{
    __shared__ Line<A_LINE> a_steps[STEPS];
    __shared__ Line<B_LINE> b_steps[STEPS];
    __shared__ PLACE staged[STAGED];
    const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, lane = thread % LANES, line = thread / LANES;
    Line<A_LINE>* const a_step = a_steps + team * STEP;
    Line<B_LINE>* const b_step = b_steps + team * STEP;
#if BATCHED
    const int own = blockIdx.x % each;
    const Int matrix = blockIdx.x / each;
    values += matrix * strides.values, offsets += matrix * strides.offsets, places += matrix * strides.places;
    b += matrix * strides.b, out += matrix * strides.out;
    if (c) c += matrix * strides.c;
#else
    const int own = blockIdx.x;
#endif
    const int number = own / tiles, block_row = number / parts;
    const int first_row = number % parts * TILE_HIGH, left = HIGH - first_row;
    const int rows = left < TILE_HIGH ? left : TILE_HIGH;
    const Int first_column = (Int)(own % tiles) * TILE_WIDE, rest = columns - first_column;
    const int wide = rest < TILE_WIDE ? (int)rest : TILE_WIDE;

    // Offsets that fall or are too large may not lead out of A.
    Int first = (Int)offsets[block_row] - base, end = (Int)offsets[block_row + 1] - base;
    first = first < 0 ? 0 : first;
    end = end > count ? count : end;
    const Span total = end > first ? (Span)(end - first) * WIDE : 0;  // columns of all blocks of this row
    const Number* const a_row = values + first * HIGH * WIDE + first_row * WIDE;
    const Number* const b_tile = b + first_column * B_COLUMN;
    Span stage = 0;  // the first staged block, counted from `first`

    const auto stage_from = [&](Span block) {
        stage = block;
        for (int i = threadIdx.x; i < STAGED; i += THREADS)
            if (first + block + i < end) staged[i] = places[first + block + i];
    };
    Number a_next[A_LOADS], b_next[B_LOADS];
    const auto load = [&](Span from) {
#pragma unroll
        for (int i = 0; i < A_LOADS; ++i) {
            const int at = i * TEAM + thread, row = at / STEP;
            const Span column = from + at % STEP;
            a_next[i] = {};
            if (row < rows && column < total)
                a_next[i] = a_row[column / WIDE * (HIGH * WIDE) + row * WIDE + column % WIDE];
        }
#pragma unroll
        for (int i = 0; i < B_LOADS; ++i) {
            const int step = step_of(i * TEAM + thread), place = place_of(i * TEAM + thread);
            const Span column = from + step;
            b_next[i] = {};
            if (step < STEP && place < wide && column < total) {
                const Int row = ((Int)staged[column / WIDE - stage] - base) * WIDE + column % WIDE;
                b_next[i] = b_tile[row * B_ROW + place * B_COLUMN];
            }
        }
    };

    Sum sums[ROWS][COLUMNS] = {};
    stage_from(0);
    __syncthreads();
    for (Span next = 0;; next += STEPS) {
        if (next < total) load(next + team * STEP);
        if (next)  // the step before, which is in shared memory
#pragma unroll 4
            for (int step = 0; step < STEP; ++step) {
                Sum x[ROWS], y[COLUMNS];
#pragma unroll
                for (int i = 0; i < ROWS; ++i) x[i] = a_step[step].at[line * ROWS + i];
#pragma unroll
                for (int j = 0; j < COLUMNS; ++j) y[j] = b_step[step].at[lane * COLUMNS + j];
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j) add_product(sums[i][j], x[i], y[j]);
            }
        if (next >= total) break;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < A_LOADS; ++i) {
            const int at = i * TEAM + thread;
            if (at / STEP < TILE_HIGH) a_step[at % STEP].at[at / STEP] = as_sum(a_next[i]);
        }
#pragma unroll
        for (int i = 0; i < B_LOADS; ++i) {
            const int step = step_of(i * TEAM + thread), place = place_of(i * TEAM + thread);
            if (step < STEP && place < TILE_WIDE) b_step[step].at[place] = as_sum(b_next[i]);
        }
        if ((next + 2 * STEPS) / WIDE >= stage + STAGED) stage_from((next + STEPS) / WIDE);
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        const int row = line * ROWS + i;
#if TEAMS > 1
        Sum* const of_teams = a_steps[0].at + thread * COLUMNS;
        __syncthreads();
        for (int j = 0; j < COLUMNS; ++j) of_teams[team * STEP * A_LINE + j] = sums[i][j];
        __syncthreads();
        if (team != i % TEAMS) continue;  // this team adds up the sums of the row
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            sums[i][j] = of_teams[j];
            for (int other = 1; other < TEAMS; ++other)
                for (int part = 0; part < PARTS; ++part)
                    sums[i][j].part[part] += of_teams[other * STEP * A_LINE + j].part[part];
        }
#endif
        if (row >= rows) continue;
        const Int at_row = (Int)block_row * HIGH + first_row + row;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            const int column = lane * COLUMNS + j;
            if (column >= wide) break;
            Sum result = times(alpha, sums[i][j]);
            if (c) {
                Sum before;
                const Result& added = c[at_row * c_row + (first_column + column) * c_column];
                for (int part = 0; part < PARTS; ++part) before.part[part] = read(added.part[part]);
                before = times(beta, before);
                for (int part = 0; part < PARTS; ++part) result.part[part] += before.part[part];
            }
            Result& target = out[at_row * out_row + (first_column + column) * out_column];
            for (int part = 0; part < PARTS; ++part) write(target.part[part], result.part[part]);
        }
    }
}
"""
)


class Read(NamedTuple):
    """How a kernel reads its operands.

    Attributes:
        block: rows and columns of A's blocks.
        widths: bytes of an offset, and of a block's column.
        is_large: whether indices of A's elements need 64 bits.
        b: the strides of B's rows and columns.
        batched: whether there are several products.
    """

    block: tuple[int, int]
    widths: tuple[int, int]
    is_large: bool
    b: tuple[int, int]
    batched: bool


def options(dtype: Dtype, result: Dtype, tile: Tile, read: Read) -> tuple[str, ...]:
    """NVRTC's options for the dtypes of A and C."""
    stored = REAL.get(dtype, dtype)
    parts = 2 if dtype.is_complex else 1
    size = (8 if stored is F64 else 4) * parts
    words = {
        "STORED": NAMES[stored],
        "RESULT": NAMES[REAL.get(result, result)],
        "REAL": "double" if stored is F64 else "float",
        "PARTS": parts,
        "LINE": INDICES[read.widths[0]],
        "PLACE": INDICES[read.widths[1]],
        "SPAN": INDICES[8 if read.is_large else 4],
        "HIGH": read.block[0],
        "WIDE": read.block[1],
        "TILE_HIGH": tile.high,
        "TILE_WIDE": tile.wide,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "TEAMS": tile.teams,
        "PAD": LINE_BYTES // size,
        "B_ROW": "1" if read.b[0] == 1 else "b_row",
        "B_COLUMN": "1" if read.b[1] == 1 else "b_column",
        "B_BY_COLUMNS": int(read.b[0] == 1 and read.b[1] != 1),
        "BATCHED": int(read.batched),
    }
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())
