"""The kernel of a matrix of blocks times a dense matrix, or of a batch, by tensor cores: BSR of f16 or bf16.

For blocks whose rows and columns are multiples of 16, and a B whose rows begin at multiples of 16 bytes. A thread block
computes a tile of C: rows of one row of A's blocks, and some columns. Its warps share the columns. In each step, STEP
columns of A and the matching rows of B are copied to shared memory, STAGES - 1 steps before they are multiplied. Sums
are f32, in the order of the blocks; the bits of a result are the same in each run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.keys import BF16, HALF
from dispatch.libraries.nvrtc.number_types import fits_vectors
from dispatch.ops.sparse.block_product_sources import (
    FEW_BLOCKS,
    OWN_TILE,
    PARAMETERS,
    STORE,
    TIMES,
    TYPES,
    Read,
    blocks_of,
    shared_options,
)

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["INSTRUCTIONS", "MIN_ARCH", "NAME", "SOURCE", "MmaTile", "fits", "options", "tile_of"]

NAME = "multiply_blocks_by_mma"
MIN_ARCH = 80  # which has the instructions
MMA = 16  # rows of A and columns of A that an instruction multiplies
VECTOR = 8  # elements of 16 bytes, which are copied at once
HEIGHTS = 64, 48, 32, 16  # of tiles
FEW = 96  # tiles
WARPS = 4


class MmaTile(NamedTuple):
    """How C is split.

    Attributes:
        high, wide: rows and columns of a thread block.
        step: columns of A that are copied at once.
        stages: steps in shared memory.
    """

    high: int
    wide: int
    step: int
    stages: int

    @property
    def threads(self) -> int:
        """The threads of a block."""
        return 32 * WARPS

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: the lines of A and B of all stages, padded."""
        return 2 * self.stages * (self.high * (self.step + VECTOR) + self.step * (self.wide + VECTOR))


def fits(request: Any) -> bool:
    """Whether the kernel supports the operands, on a GPU of MIN_ARCH or later."""
    high, wide = request.form.block
    layouts = [request.layout_of("values"), request.layout_of("b")]
    return (
        request.values.dtype in HALF
        and high % MMA == 0
        and wide % MMA == 0
        and layouts[1].shape[-1] % VECTOR == 0
        and all(fits_vectors(layout, VECTOR) for layout in layouts)
    )


def tile_of(high: int, columns: int, lines: int) -> MmaTile:
    """The tile for blocks of `high` rows, a C of so many columns, and so many rows of blocks in all products.

    With fewer tiles than FEW_BLOCKS narrower ones are faster, with fewer than FEW also lower ones.
    """
    rows = next(each for each in HEIGHTS if high % each == 0)
    wide = 128 if rows <= 32 and columns > 64 else 64
    while wide > 32 and (wide >= 2 * columns or blocks_of(lines, high, columns, rows, wide) < FEW_BLOCKS):
        wide //= 2
    while rows % 32 == 0 and blocks_of(lines, high, columns, rows, wide) < FEW:
        rows //= 2
    return MmaTile(rows, wide, *((32, 4) if wide == 128 else (64, 3)))


# The instructions; tests replace them by functions for a CPU.
INSTRUCTIONS = r"""
__device__ void copy_vector(void* to, const void* from, bool is_there)  // 16 bytes, or zeros
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT> __device__ void wait_for_stages()
{
    asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

__device__ void load_a(unsigned (&x)[4], const Number* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"((unsigned)__cvta_generic_to_shared(row)));
}

__device__ void load_b(unsigned (&y)[4], const Number* row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "r"((unsigned)__cvta_generic_to_shared(row)));
}

#if BRAIN
#define MMA_TYPES "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define MMA_TYPES "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
__device__ void multiply(float (&sum)[4], const unsigned (&x)[4], unsigned y, unsigned z)
{
    asm volatile(MMA_TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y), "r"(z));
}
"""
SOURCE = (
    TYPES
    + TIMES
    + INSTRUCTIONS
    + r"""
const int WARPS = 4, THREADS = 32 * WARPS, VECTOR = 8;
const int DOWN = TILE_HIGH % 32 ? 1 : 2, ACROSS = WARPS / DOWN;  // warps in a column and in a row of the tile
const int A_LINE = STEP + VECTOR, B_LINE = TILE_WIDE + VECTOR;  // padded, so that no two rows of a matrix share a bank
const int A_VECTORS = STEP / VECTOR, B_VECTORS = TILE_WIDE / VECTOR;  // of a line
const int A_STAGE = TILE_HIGH * A_LINE, B_STAGE = STEP * B_LINE;  // numbers
const int HEIGHT = TILE_HIGH / DOWN / 16, WIDTH = TILE_WIDE / ACROSS / 8;  // instructions of a warp, down and across
struct alignas(16) Vector { Number at[VECTOR]; };

extern "C" __global__ void __launch_bounds__(THREADS, 2) multiply_blocks_by_mma(
    """
    + PARAMETERS
    + r""")
{
    extern __shared__ Vector memory[];
    Number *const a_stages = memory->at, *const b_stages = a_stages + STAGES * A_STAGE;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int own_rows = warp / ACROSS * HEIGHT * 16, own_columns = warp % ACROSS * WIDTH * 8;
    const int own_a = (own_rows + lane % 16) * A_LINE + lane / 16 * 8;  // the row that a lane loads for its warp
    const int own_b = lane % 16 * B_LINE + own_columns + lane / 16 * 8;
"""
    + OWN_TILE
    + STORE
    + r"""
    const int steps = (int)((total + STEP - 1) / STEP);

    const auto load = [&](int step) {
        Number *const a_stage = a_stages + step % STAGES * A_STAGE, *const b_stage = b_stages + step % STAGES * B_STAGE;
#pragma unroll
        for (int i = thread; i < TILE_HIGH * A_VECTORS; i += THREADS) {
            const int row = i / A_VECTORS, at = i % A_VECTORS * VECTOR;
            const Span column = (Span)step * STEP + at;
            const bool is_there = column < total;
            const Number* const from = a_row + column / WIDE * (HIGH * WIDE) + row * WIDE + column % WIDE;
            copy_vector(&a_stage[row * A_LINE + at], is_there ? from : values, is_there);
        }
#pragma unroll
        for (int i = thread; i < STEP * B_VECTORS; i += THREADS) {
            const int line = i / B_VECTORS, at = i % B_VECTORS * VECTOR;
            const Span column = (Span)step * STEP + line;
            const bool is_there = column < total && at < wide;
            const Number* from = b;
            if (is_there) {
                const Int row = ((Int)places[first + column / WIDE] - base) * WIDE + column % WIDE;
                from = b + row * b_row + (first_column + at);
            }
            copy_vector(&b_stage[line * B_LINE + at], from, is_there);
        }
    };

    float sums[HEIGHT][WIDTH][4] = {};
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) load(step);
        end_stage();
    }
    for (int step = 0; step < steps; ++step) {
        wait_for_stages<STAGES - 2>();
        __syncthreads();  // this stage is there, and the one that is loaded next has been multiplied
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        end_stage();
        const Number* const a_own = a_stages + step % STAGES * A_STAGE + own_a;
        const Number* const b_own = b_stages + step % STAGES * B_STAGE + own_b;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            unsigned x[HEIGHT][4];
#pragma unroll
            for (int i = 0; i < HEIGHT; ++i) load_a(x[i], a_own + i * 16 * A_LINE + k);
#pragma unroll
            for (int j = 0; j < WIDTH; j += 2) {
                unsigned y[4];  // of two instructions; the last one's second half may be padding
                load_b(y, b_own + k * B_LINE + j * 8);
#pragma unroll
                for (int i = 0; i < HEIGHT; ++i) {
                    multiply(sums[i][j], x[i], y[0], y[1]);
                    if (j + 1 < WIDTH) multiply(sums[i][j + 1], x[i], y[2], y[3]);
                }
            }
        }
    }

#pragma unroll
    for (int i = 0; i < HEIGHT; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int column = own_columns + j * 8 + lane % 4 * 2 + n % 2;
                if (column < wide) store(own_rows + i * 16 + lane / 4 + n / 2 * 8, column, {{sums[i][j][n]}});
            }
}
"""
)


def options(dtype: Dtype, result: Dtype, tile: MmaTile, read: Read) -> tuple[str, ...]:
    """NVRTC's options for the dtypes of A and C."""
    shared = shared_options(dtype, result, tile.high, tile.wide, read)
    return *shared, f"-DSTEP={tile.step}", f"-DSTAGES={tile.stages}", f"-DBRAIN={int(dtype is BF16)}"
