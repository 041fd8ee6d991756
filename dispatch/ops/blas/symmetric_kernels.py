"""BLAS level 2 by a kernel of this library, for large symmetric and Hermitian matrices: `symv` and `hemv`.

NVRTC compiles it for the current GPU. Each element of the triangle is read once, for its own row and for the row of its
mirrored element. Blocks process square tiles of the triangle and write each tile's part of the result to the plan's
memory; the block that finishes the last tile of some rows adds their parts, always in the same order. It is one launch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.keys import C64, C128, F32, F64, Dtype, member
from dispatch.libraries.nvrtc.launching import LaunchPlan, cleared, number_of
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS, WIDEST
from dispatch.ops.blas.arrangements import leading_dimension, misalignment
from dispatch.ops.blas.choices import FillMode
from dispatch.ops.blas.level1_kernels import REAL, THREADS
from dispatch.refusal import SizeReason

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["MAX_ROWS", "MIN_ROWS", "Choice", "choice_of", "large_and_in_lines", "own_symmetric"]

MIN_ROWS = 256  # rows; with fewer, any implementation spends most of the time on the launch
# In rows, too. On an H100 for 4096 rows cuBLAS took 29.5 µs in f32 and the kernel 19.6, in f64 38.5 and 36.1; for 8192
# rows cuBLAS was faster, 65.4 and 71.6 µs, in f64 106 and 113. Sizes in between were not measured.
MAX_ROWS = 6144
TILES = {F32: 64, F64: 64, C64: 64, C128: 32}  # rows and columns of a tile
BLOCKS = {F32: 5, F64: 4, C64: 4, C128: 4}  # concurrent blocks per multiprocessor
STEPS = 4  # lines of a tile from which a thread reads before it computes
COUNTER = 4  # bytes

# Memory consists of lines: the rows of a row-major matrix, the columns of a column-major one. Tiles are numbered so
# that those of the triangle are (row, column) with row >= column, in reverse order if the stored triangle is above the
# diagonal.
SYMMETRIC = (
    NUMBERS
    + r"""
typedef NUMBER Real;
typedef unsigned long long Index;
typedef long long Step;
struct alignas(sizeof(Real) * PARTS) Number { Real part[PARTS]; };
struct alignas(16) Vector { Number at[VECTOR]; };
const unsigned LANES = TILE / VECTOR, LINES = THREADS / LANES, ROUNDS = TILE / (LINES * STEPS), WARPS = THREADS / 32;
static_assert(STEPS <= LANES && LANES <= 32 && ROUNDS * LINES * STEPS == TILE, "each line of a tile has its threads");
static_assert(TILE <= THREADS && THREADS <= WARPS * TILE, "there is room for the sums of columns, and of all threads");

__device__ void add(Number& sum, const Number& x)
{
    for (int i = 0; i < PARTS; ++i) sum.part[i] += x.part[i];
}

// With a sign of -1 it is the conjugate of x that is multiplied.
__device__ void add_product(Number& sum, const Number& x, const Number& y, Real sign)
{
    sum.part[0] = fma(x.part[0], y.part[0], sum.part[0]);
#if PARTS == 2
    const Real imag = sign * x.part[1];
    sum.part[0] = fma(-imag, y.part[1], sum.part[0]);
    sum.part[1] = fma(x.part[0], y.part[1], sum.part[1]);
    sum.part[1] = fma(imag, y.part[0], sum.part[1]);
#endif
}

__device__ bool is_zero(const Number& x)
{
    bool found = true;
    for (int i = 0; i < PARTS; ++i) found = found && x.part[i] == 0;
    return found;
}

__device__ Number either(bool is_first, Number x, Number y)
{
    for (int i = 0; i < PARTS; ++i) x.part[i] = is_first ? x.part[i] : y.part[i];
    return x;
}

__device__ Number beside(const Number& x, unsigned lanes)
{
    Number theirs;
    for (int i = 0; i < PARTS; ++i) theirs.part[i] = __shfl_xor_sync(0xffffffff, x.part[i], lanes);
    return theirs;
}

// The sums over the lanes of a line, each of a step: a lane is given that of step lane / (LANES / STEPS). Half of the
// lanes go on with half of the steps.
template <unsigned kept>
__device__ Number over_lanes(Number* sums, unsigned lane)
{
    const unsigned lanes = LANES * kept / STEPS;
    const bool is_upper = lane & lanes;
#pragma unroll
    for (unsigned i = 0; i < kept; ++i) {
        const Number theirs = beside(either(is_upper, sums[i], sums[i + kept]), lanes);
        sums[i] = either(is_upper, sums[i + kept], sums[i]);
        add(sums[i], theirs);
    }
    if constexpr (kept > 1) return over_lanes<kept / 2>(sums, lane);
#pragma unroll
    for (unsigned rest = lanes / 2; rest; rest /= 2) add(sums[0], beside(sums[0], rest));
    return sums[0];
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
symmetric(const Number* __restrict__ a, const Number* __restrict__ x, const Number* y, Number* out, Number alpha,
          Number beta, Index n, Step line_step, Step x_step, Step y_step, Step out_step, unsigned* done,
          Number* __restrict__ parts)
{
    __shared__ Number sums[WARPS * TILE];
    __shared__ bool is_last[2];
    const unsigned tiles = (n + TILE - 1) / TILE, pitch = tiles * TILE;
    const unsigned lane = threadIdx.x % LANES, line = threadIdx.x / LANES;

    // The block's tile, which are counted row by row: the root is its row, or one more.
    unsigned row = sqrtf(2.0f * blockIdx.x);
    if (row * (row + 1) / 2 > blockIdx.x) --row;
    const unsigned column = blockIdx.x - row * (row + 1) / 2;
    auto place = [=](unsigned tile) { return Index(ABOVE ? tiles - 1 - tile : tile) * TILE; };

    auto finish = [=](Index i, const Number& sum) {
        Number made = {};
        if (!is_zero(beta)) add_product(made, beta, y[Step(i) * y_step], 1);
        add_product(made, alpha, sum, 1);
        out[Step(i) * out_step] = made;
    };
    if (is_zero(alpha)) {  // then a and x are not read
        const Index at = place(column) + threadIdx.x;
        if (row == column && threadIdx.x < TILE && at < n) finish(at, Number());
        return;
    }

    auto place_of = [=](int j) { return place(column) + (ALIGNED ? lane * VECTOR + j : lane + j * LANES); };
    Number x_columns[VECTOR] = {}, column_sums[VECTOR] = {};
#pragma unroll
    for (int j = 0; j < VECTOR; ++j)
        if (place_of(j) < n) x_columns[j] = x[Step(place_of(j)) * x_step];
    const bool is_whole = row != column && place(row) + TILE <= n && place(column) + TILE <= n;
#pragma unroll 1
    for (unsigned round = 0; round < ROUNDS; ++round) {
        const Index top = place(row) + round * STEPS * LINES + line;
        auto is_stored = [=](int i, int j) {
            const Index at = top + i * LINES, along = place_of(j);
            return at < n && along < n && (row != column || (ABOVE ? along >= at : along <= at));
        };
        Vector read[STEPS];
        Number x_lines[STEPS] = {}, line_sums[STEPS] = {};
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
            const Number* from = a + Step(top + i * LINES) * line_step;
            if (is_whole && ALIGNED) {
                read[i] = *(const Vector*)(from + place_of(0));
            } else {
#pragma unroll
                for (int j = 0; j < VECTOR; ++j)
                    if (is_whole || is_stored(i, j)) read[i].at[j] = from[place_of(j)];
            }
            if (is_whole || top + i * LINES < n) x_lines[i] = x[Step(top + i * LINES) * x_step];
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i)
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                if (!is_whole && !is_stored(i, j)) continue;
                const bool is_diagonal = !is_whole && top + i * LINES == place_of(j);
#if HERMITIAN
                if (is_diagonal) read[i].at[j].part[1] = 0;
#endif
                add_product(line_sums[i], read[i].at[j], x_columns[j], LINE_SIGN);
                if (!is_diagonal) add_product(column_sums[j], read[i].at[j], x_lines[i], COLUMN_SIGN);
            }
        const Number sum = over_lanes<STEPS / 2>(line_sums, lane);
        if (lane % (LANES / STEPS) == 0)
            parts[Index(column) * pitch + top + lane / (LANES / STEPS) * LINES] = sum;
    }

    // The sums of columns: over the lines of a warp, then over warps.
#pragma unroll
    for (int j = 0; j < VECTOR; ++j) {
#pragma unroll
        for (unsigned lanes = LANES; lanes < 32; lanes *= 2) add(column_sums[j], beside(column_sums[j], lanes));
        if (threadIdx.x % 32 < LANES)
            sums[threadIdx.x / 32 * TILE + unsigned(place_of(j) - place(column))] = column_sums[j];
    }
    __syncthreads();
    if (threadIdx.x < TILE) {
        Number sum = sums[threadIdx.x];
#pragma unroll
        for (unsigned warp = 1; warp < WARPS; ++warp) add(sum, sums[warp * TILE + threadIdx.x]);
        parts[Index(row + 1) * pitch + place(column) + threadIdx.x] = sum;
    }
    __syncthreads();

    // The result of a row of tiles has a part of each tile in it, of that on the diagonal two, and of each one in the
    // column below. Blocks that have made some of them count; the last one adds them.
    const unsigned count = row == column ? 1 : 2;
    if (threadIdx.x < count) {
        __threadfence();
        const unsigned at = threadIdx.x ? column : row;
        is_last[threadIdx.x] = atomicInc(done + at, tiles - 1) == tiles - 1;  // which makes it 0 again
        __threadfence();
    }
    __syncthreads();
    for (unsigned i = 0; i < count; ++i) {
        if (!is_last[i]) continue;
        const Index top = place(i ? column : row);
        const unsigned at = threadIdx.x % TILE;
        Number sum = {};
#pragma unroll 8
        for (unsigned part = threadIdx.x / TILE; part <= tiles; part += THREADS / TILE) {
            const Number* from = parts + Index(part) * pitch + top + at;
            for (int j = 0; j < PARTS; ++j) sum.part[j] += __ldcg(from->part + j);
        }
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.x < TILE && top + at < n) {
            for (unsigned other = 1; other < THREADS / TILE; ++other) add(sum, sums[other * TILE + at]);
            finish(top + at, sum);
        }
        __syncthreads();
    }
}
"""
)


def large_and_in_lines(request: Any) -> str:
    """Rule: a row-major or column-major matrix of many rows, but not too many, and vectors of any step."""
    layouts = {name: request.layout_of(name) for name in ("a", "x", *(("y",) if request.has_added else ()), "out")}
    for name, layout in layouts.items():
        if text := misalignment(layout):
            return f"{name}: {text}"
    layout = layouts.pop("a")
    if not MIN_ROWS <= layout.shape[0] <= MAX_ROWS:
        return SizeReason(f"needs {MIN_ROWS} to {MAX_ROWS} rows, a is {layout}")
    if all(leading_dimension(layout, row=row) is None for row in (True, False)):
        return f"needs a row-major or column-major, with adjacent elements in each line, has {layout}: copy it"
    for name, layout in layouts.items():
        if layout.strides[0] == 0:
            return f"needs {name} with a stride other than 0, has {layout}: copy it"
    return ""


class Choice(NamedTuple):
    """A kernel: the matrix's dtype and memory layout.

    Attributes:
        hermitian: whether elements are mirrored as their conjugates.
        row: whether the lines are rows.
        above: whether the stored elements are at the end of each line.
        aligned: whether 16 bytes can be read at once.
    """

    dtype: Dtype
    hermitian: bool
    row: bool
    above: bool
    aligned: bool

    @property
    def tile(self) -> int:
        """The rows and columns of a tile."""
        return TILES[self.dtype]

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's, but for the architecture."""
        chosen = {
            "NUMBER": NAMES[REAL.get(self.dtype, self.dtype)],
            "PARTS": 2 if self.dtype.is_complex else 1,
            "TILE": self.tile,
            "VECTOR": WIDEST // self.dtype.itemsize,
            "ALIGNED": int(self.aligned),
            "ABOVE": int(self.above),
            "HERMITIAN": int(self.hermitian),
            "LINE_SIGN": -1 if self.hermitian and not self.row else 1,
            "COLUMN_SIGN": -1 if self.hermitian and self.row else 1,
            "STEPS": STEPS,
            "THREADS": THREADS,
            "BLOCKS": BLOCKS[self.dtype],
        }
        return ("-std=c++17", *(f"-D{name}={value}" for name, value in chosen.items()))


def choice_of(request: Any) -> Choice:
    """The kernel for a request's matrix."""
    layout, dtype = request.a.layout, request.a.dtype
    row = leading_dimension(layout, row=True) is not None
    step = leading_dimension(layout, row=row) or 1
    aligned = layout.alignment >= WIDEST and step * dtype.itemsize % WIDEST == 0
    above = row == (member(request.uplo) is FillMode.UPPER)
    return Choice(dtype, request.op == "hemv", row, above, aligned)


def own_symmetric(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch."""
    choice, n = choice_of(request), request.a.shape[0]
    tiles = -(-n // choice.tile)
    counters = -(-tiles * COUNTER // WIDEST) * WIDEST
    parts = tiles + 1  # of each element of the result
    scratch = cleared(executor, counters, parts * tiles * choice.tile * choice.dtype.itemsize)
    vectors = [
        request.layout_of(name).strides[0] if name != "y" or request.has_added else 0 for name in ("x", "y", "out")
    ]
    slots = [*(ctypes.c_void_p() for _ in range(4)), *(number_of(choice.dtype) for _ in range(2))]
    arguments = [
        ctypes.c_uint64(n),
        *map(ctypes.c_int64, (leading_dimension(request.a.layout, row=choice.row) or 1, *vectors)),
        ctypes.c_void_p(scratch.ptr),
        ctypes.c_void_p(scratch.ptr + counters),
    ]
    blocks = tiles * (tiles + 1) // 2
    filled = [(slot, place) for place, slot in enumerate(slots)]
    kernel = SYMMETRIC, "symmetric", choice.options
    return LaunchPlan(executor, row, kernel, (blocks, THREADS), filled, arguments, scratch)
