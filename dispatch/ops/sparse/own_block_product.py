"""Plans of a matrix of blocks times a dense one by the kernel of block_product_kernels.py: one launch."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.keys import C128, F64
from dispatch.libraries.cusparse.calls import IdlePlan
from dispatch.libraries.nvrtc.launching import LaunchPlan, number_of
from dispatch.ops.sparse.block_product_kernels import NAME, SOURCE, Read, options, tile_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

FEW = 256  # thread blocks: fewer do not fill a GPU
MAX_BLOCKS = 2**31 - 1  # of a launch
MAX_INT, SLACK = 2**31 - 1, 64  # a step may reach beyond the last block


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused for too many thread blocks."""
    b, out = request.layout_of("b"), request.layout_of("out")
    if not out.size:
        return IdlePlan(row, capture_safe=False)
    form, dtype = request.form, request.values.dtype
    (high, wide), columns = form.block, out.shape[1]
    lines, count = form.shape[0] // high, request.values.shape[0]
    work = 16 if dtype is C128 else 8 if dtype is F64 or dtype.is_complex else 4
    tile = tile_of(high, columns, work, few=False)
    if blocks_of(lines, high, columns, tile) < FEW:
        tile = tile_of(high, columns, work, few=True)
    blocks = blocks_of(lines, high, columns, tile)
    if blocks > MAX_BLOCKS:
        raise Refused(f"needs at most {MAX_BLOCKS:,} tiles of the result, has {blocks:,}")
    widths = request.rows.dtype.itemsize, request.columns.dtype.itemsize
    read = Read((high, wide), widths, (count + SLACK) * high * wide > MAX_INT, b.strides)
    kernel = SOURCE, NAME, options(dtype, out.dtype, tile, read)
    added = request.layout_of("c") if request.reads_added else out
    place_of_c = request.place_of("c") if request.reads_added else None
    operands = (*map(request.place_of, ("values", "rows", "columns", "b")), place_of_c, request.place_of("out"))
    first = len(request.reads) + len(request.writes)
    filled = [*((ctypes.c_void_p(), place) for place in operands)]
    filled += [(number_of(dtype), first + request.numbers.index(name)) for name in ("alpha", "beta")]
    extents = (count, form.base, columns, *b.strides, *added.strides, *out.strides)
    parts, tiles = -(-high // tile.high), -(-columns // tile.wide)
    arguments = (*map(ctypes.c_int64, extents), ctypes.c_int(parts), ctypes.c_int(tiles))
    return LaunchPlan(executor, row, kernel, (blocks, tile.threads), filled, arguments)


def blocks_of(lines: int, high: int, columns: int, tile: Any) -> int:
    """The number of thread blocks, for a matrix with so many rows of blocks."""
    return int(lines * -(-high // tile.high) * -(-columns // tile.wide))
