"""What the kernels of a matrix of blocks times a dense one have in common, in CUDA C++: types, parameters, tiles of C.

block_product_kernels.py's kernel supports any blocks and dtypes, block_mma_kernels.py's uses tensor cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = [
    "FEW_BLOCKS",
    "OWN_TILE",
    "PARAMETERS",
    "REAL",
    "STORE",
    "TIMES",
    "TYPES",
    "Read",
    "blocks_of",
    "shared_options",
]

REAL = {C64: F32, C128: F64}
INDICES = {4: "int", 8: "long long"}  # by size in bytes
FEW_BLOCKS = 256  # thread blocks: fewer do not fill a GPU

TYPES = (
    NUMBERS
    + r"""
typedef long long Int;
typedef SPAN Span;  // of indices in one row of blocks
typedef REAL Real;
struct alignas(sizeof(STORED) * PARTS) Number { STORED part[PARTS]; };
struct alignas(sizeof(RESULT) * PARTS) Result { RESULT part[PARTS]; };
struct alignas(sizeof(Real) * PARTS) Sum { Real part[PARTS]; };
struct BatchStrides { Int values, offsets, places, b, c, out; };  // in elements from one matrix to the next
"""
)
# Blocks have HIGH rows and WIDE columns, one row after another. `parts`: the tiles of C's rows in a row of blocks;
# `tiles`: those of C's columns; `each`: the thread blocks of one product. Without `c` nothing is added.
PARAMETERS = """const Number* __restrict__ values, const LINE* __restrict__ offsets, const PLACE* __restrict__ places,
    const Number* __restrict__ b, const Result* c, Result* out, Sum alpha, Sum beta, Int count, Int base, Int columns,
    Int b_row, Int b_column, Int c_row, Int c_column, Int out_row, Int out_column, int parts, int tiles, int each,
    BatchStrides strides"""
OWN_TILE = r"""
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
"""
# Writes the sum of an element of C, at a row and column of the tile.
STORE = r"""
    const auto store = [&](int row, int column, const Sum& sum) {
        const Int at_row = (Int)block_row * HIGH + first_row + row, at_column = first_column + column;
        Sum result = times(alpha, sum);
        if (c) {
            Sum before;
            const Result& added = c[at_row * c_row + at_column * c_column];
            for (int part = 0; part < PARTS; ++part) before.part[part] = read(added.part[part]);
            before = times(beta, before);
            for (int part = 0; part < PARTS; ++part) result.part[part] += before.part[part];
        }
        Result& target = out[at_row * out_row + at_column * out_column];
        for (int part = 0; part < PARTS; ++part) write(target.part[part], result.part[part]);
    };
"""
TIMES = r"""
__device__ Sum times(const Sum& factor, const Sum& x)
{
#if PARTS == 2
    return {{factor.part[0] * x.part[0] - factor.part[1] * x.part[1],
             factor.part[0] * x.part[1] + factor.part[1] * x.part[0]}};
#else
    return {{factor.part[0] * x.part[0]}};
#endif
}
"""


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


def blocks_of(lines: int, high: int, columns: int, tile_high: int, tile_wide: int) -> int:
    """The number of thread blocks, for so many rows of blocks of `high` rows, and tiles of that size."""
    return lines * -(-high // tile_high) * -(-columns // tile_wide)


def shared_options(dtype: Dtype, result: Dtype, high: int, wide: int, read: Read) -> tuple[str, ...]:
    """The options of the parts that both kernels have in common, for tiles of `high` rows and `wide` columns."""
    stored = REAL.get(dtype, dtype)
    words = {
        "STORED": NAMES[stored],
        "RESULT": NAMES[REAL.get(result, result)],
        "REAL": "double" if stored is F64 else "float",
        "PARTS": 2 if dtype.is_complex else 1,
        "LINE": INDICES[read.widths[0]],
        "PLACE": INDICES[read.widths[1]],
        "SPAN": INDICES[8 if read.is_large else 4],
        "HIGH": read.block[0],
        "WIDE": read.block[1],
        "TILE_HIGH": high,
        "TILE_WIDE": wide,
        "B_ROW": "1" if read.b[0] == 1 else "b_row",
        "B_COLUMN": "1" if read.b[1] == 1 else "b_column",
        "BATCHED": int(read.batched),
    }
    return "-std=c++17", *(f"-D{name}={word}" for name, word in words.items())
