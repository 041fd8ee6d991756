"""The kernel of a matrix of blocks times a dense matrix, or of a batch, in CUDA C++: BSR of any blocks, not transposed.

A thread block computes a tile of C: the rows of one row of A's blocks, or MAX_HIGH of them, and some columns. Along
that row of blocks the columns of all blocks are numbered consecutively: in each step, STEP of these columns of A and
the matching rows of B are copied to shared memory, while those of the next step are loaded into registers. So blocks of
4 take as few steps as blocks of 32. Each thread adds up the products of some rows and columns, in the order of the
blocks; the bits of a result are the same in each run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import F64
from dispatch.ops.sparse.block_product_sources import (
    OWN_TILE,
    PARAMETERS,
    REAL,
    STORE,
    TIMES,
    TYPES,
    Read,
    blocks_of,
    shared_options,
)

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["NAME", "SOURCE", "Tile", "options", "tile_of"]

NAME = "multiply_blocks"
MAX_HIGH, MAX_WIDE, MIN_WIDE = 64, 64, 8  # of a tile of C; it is narrower than MIN_WIDE only if C is
FEW = 90  # tiles: with fewer, narrower ones are faster
ENOUGH_THREADS = 64  # of a team, so that several warps hide the latency of loads
SHARES = ((4, 4), (4, 2), (2, 2))  # rows and columns of a thread: the first that leaves enough threads, or the last
LARGE_SHARE = 8, 4  # with MANY tiles, 0.89 of the time
MANY = 512  # tiles
STEP = 16  # columns of A in shared memory: 32 took up to 1.2 times as long
MAX_TEAMS = 4
MAX_THREADS = 1 << 16  # of a launch, up to which teams are added: about half as many as a GPU runs at once
MAX_BLOCK = 512  # threads of a block, up to which teams are added
SHARED_BYTES = 47 << 10  # for the steps of all teams, of 48 KiB
LINE_BYTES = 16  # of the padding of lines in shared memory, which keeps vectors aligned
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

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: all of it is static."""
        return 0


def tile_of(high: int, columns: int, item: int, lines: int, span: int) -> Tile:
    """The tile for blocks of `high` rows, a C of so many columns, and sums of `item` bytes.

    `lines` are the rows of blocks, of all products of a batch, and `span` the columns of all blocks of an average row.
    If there are too few tiles to fill a GPU, they are narrower, and have several teams.
    """
    wide = MAX_WIDE
    while wide > 1 and (wide >= 2 * columns or (wide > MIN_WIDE and blocks_of(lines, high, columns, high, wide) < FEW)):
        wide //= 2
    tile = _tile(min(high, MAX_HIGH), wide, is_large=blocks_of(lines, high, columns, MAX_HIGH, wide) >= MANY)
    threads = blocks_of(lines, high, columns, tile.high, tile.wide) * tile.threads
    while (
        2 * tile.teams <= MAX_TEAMS
        and 2 * tile.teams * threads <= MAX_THREADS
        and 2 * tile.threads <= MAX_BLOCK
        and 2 * tile.teams * tile.step <= span
        and 2 * tile.teams * tile.step * ((tile.high + tile.wide) * item + STEP_BYTES) <= SHARED_BYTES
    ):
        tile = tile._replace(teams=2 * tile.teams)
    return tile


def _tile(high: int, wide: int, *, is_large: bool) -> Tile:
    """The tile of that size with one team; with many tiles, threads of low tiles compute more elements."""
    for rows, columns in (LARGE_SHARE, *SHARES) if is_large and high <= MAX_HIGH // 2 else SHARES:
        if rows <= high and columns <= wide:
            tile = Tile(high, wide, rows, columns, STEP)
            if tile.threads >= ENOUGH_THREADS:
                return tile
    rows, columns = min(high, SHARES[-1][0]), min(wide, SHARES[-1][1])
    return Tile(high, wide, rows, columns, STEP)


SOURCE = (
    TYPES
    + TIMES
    + r"""
template <int COUNT> struct alignas(16) Line { Sum at[COUNT]; };  // so that a thread reads its vectors at once
const int LANES = TILE_WIDE / COLUMNS, LINES = (TILE_HIGH + ROWS - 1) / ROWS;
const int TEAM = LINES * LANES, THREADS = TEAM * TEAMS, STEPS = STEP * TEAMS;
const int A_LINE = LINES * ROWS + PAD, B_LINE = TILE_WIDE + PAD;
const int A_LOADS = (TILE_HIGH * STEP + TEAM - 1) / TEAM, B_LOADS = (TILE_WIDE * STEP + TEAM - 1) / TEAM;
const int STAGED = 2 * STEPS + 64;  // block columns in shared memory: those of two steps, which may divide a block
const bool IN_A = A_LINE > B_LINE;  // where a row of each thread's sums fits
const int OF_TEAM = STEP * (IN_A ? A_LINE : B_LINE);
static_assert(TEAMS == 1 || TEAM * COLUMNS <= OF_TEAM, "a row of each thread's sums fits where the steps were");

__device__ void add_product(Sum& sum, const Sum& x, const Sum& y)
{
    sum.part[0] = fma(x.part[0], y.part[0], sum.part[0]);
#if PARTS == 2
    sum.part[0] = fma(-x.part[1], y.part[1], sum.part[0]);
    sum.part[1] = fma(x.part[0], y.part[1], fma(x.part[1], y.part[0], sum.part[1]));
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

extern "C" __global__ void __launch_bounds__(THREADS, THREADS < 512 ? 512 / THREADS : 1) multiply_blocks(
    """
    + PARAMETERS
    + r""")
{
    __shared__ Line<A_LINE> a_steps[STEPS];
    __shared__ Line<B_LINE> b_steps[STEPS];
    __shared__ PLACE staged[STAGED];
    const int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, lane = thread % LANES, line = thread / LANES;
    Line<A_LINE>* const a_step = a_steps + team * STEP;
    Line<B_LINE>* const b_step = b_steps + team * STEP;
"""
    + OWN_TILE
    + r"""
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

"""
    + STORE
    + r"""
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
        Sum* const of_teams = (IN_A ? a_steps[0].at : b_steps[0].at) + thread * COLUMNS;
        __syncthreads();
        for (int j = 0; j < COLUMNS; ++j) of_teams[team * OF_TEAM + j] = sums[i][j];
        __syncthreads();
        if (team != i % TEAMS) continue;  // this team adds up the sums of the row
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
            sums[i][j] = of_teams[j];
            for (int other = 1; other < TEAMS; ++other)
                for (int part = 0; part < PARTS; ++part)
                    sums[i][j].part[part] += of_teams[other * OF_TEAM + j].part[part];
        }
#endif
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j)
            if (lane * COLUMNS + j < wide) store(row, lane * COLUMNS + j, sums[i][j]);
    }
}
"""
)


def options(dtype: Dtype, result: Dtype, tile: Tile, read: Read) -> tuple[str, ...]:
    """NVRTC's options for the dtypes of A and C."""
    size = (8 if REAL.get(dtype, dtype) is F64 else 4) * (2 if dtype.is_complex else 1)
    words = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "TEAMS": tile.teams,
        "PAD": LINE_BYTES // size,
        "B_BY_COLUMNS": int(read.b[0] == 1 and read.b[1] != 1),
    }
    return *shared_options(dtype, result, tile.high, tile.wide, read), *(
        f"-D{name}={word}" for name, word in words.items()
    )
