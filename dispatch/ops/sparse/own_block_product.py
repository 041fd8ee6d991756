"""Plans of a matrix of blocks times a dense one, or of a batch: one launch of a kernel of this library.

That is block_mma_kernels.py's, for tensor cores, where it supports the operands, or else block_product_kernels.py's.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from dispatch.errors import Refused
from dispatch.keys import C128, F64
from dispatch.libraries.cusparse.calls import IdlePlan
from dispatch.libraries.nvrtc.launching import LaunchPlan, number_of
from dispatch.ops.sparse import block_mma_kernels, block_product_kernels
from dispatch.ops.sparse.batched_rules import BLOCK_AXES, nnz_of
from dispatch.ops.sparse.block_product_sources import Read, blocks_of
from dispatch.ops.sparse.own_matrix import MATRIX, batch_stride
from dispatch.ops.sparse.plain_operators import BatchStrides

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

PARTS = {"values": BLOCK_AXES, "rows": 1, "columns": 1}  # the parts of a matrix, and their axes
MAX_BLOCKS = 2**31 - 1  # of a launch
MAX_INT, SLACK = 2**31 - 1, 64  # a step may reach beyond the last block


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused for too many thread blocks."""
    b, out = request.layout_of("b"), request.layout_of("out")
    if not out.size:
        return IdlePlan(row, capture_safe=False)
    form, dtype = request.form, request.values.dtype
    (high, wide), columns = form.block, out.shape[-1]
    lines, count = form.shape[0] // high, nnz_of(request)
    batch = out.shape[0] if len(out.shape) > MATRIX else 1
    work = 16 if dtype is C128 else 8 if dtype is F64 or dtype.is_complex else 4
    kernels: Any = block_product_kernels
    if executor.device.arch >= block_mma_kernels.MIN_ARCH and block_mma_kernels.fits(request):
        kernels = block_mma_kernels
        tile: Any = block_mma_kernels.tile_of(high, columns, batch * lines)
    else:
        tile = block_product_kernels.tile_of(high, columns, work, batch * lines, count * wide // max(lines, 1))
    each = blocks_of(lines, high, columns, tile.high, tile.wide)
    if batch * each > MAX_BLOCKS:
        raise Refused(f"needs at most {MAX_BLOCKS:,} tiles of the results, has {batch * each:,}")
    widths = request.rows.dtype.itemsize, request.columns.dtype.itemsize
    read = Read((high, wide), widths, (count + SLACK) * high * wide > MAX_INT, b.strides[-MATRIX:], batch > 1)
    kernel = kernels.SOURCE, kernels.NAME, kernels.options(dtype, out.dtype, tile, read)
    added = request.layout_of("c") if request.reads_added else out
    place_of_c = request.place_of("c") if request.reads_added else None
    operands = (*map(request.place_of, ("values", "rows", "columns", "b")), place_of_c, request.place_of("out"))
    first = len(request.reads) + len(request.writes)
    filled = [*((ctypes.c_void_p(), place) for place in operands)]
    filled += [(number_of(dtype), first + request.numbers.index(name)) for name in ("alpha", "beta")]
    extents = (count, form.base, columns, *(step for one in (b, added, out) for step in one.strides[-MATRIX:]))
    numbers = (-(-high // tile.high), -(-columns // tile.wide), each)
    strides = [batch_stride(request.layout_of(name), axes) for name, axes in PARTS.items()]
    strides += [batch_stride(layout, MATRIX) for layout in (b, added, out)]
    arguments = (*map(ctypes.c_int64, extents), *map(ctypes.c_int, numbers), BatchStrides(*strides))
    return LaunchPlan(executor, row, kernel, (batch * each, tile.threads), filled, arguments, shared=tile.shared)
