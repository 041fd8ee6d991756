"""Plans of a sparse matrix times a vector by the kernel of product_kernels.py, also with an epilogue: one launch.

The partial sums that blocks store for the last block, and counters that are 0 between launches, are memory of the plan.
Its runs are on one stream, one after another; other plans have memory of their own.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from dispatch.core.matrix_choices import Operation
from dispatch.libraries.cusparse.calls import IdlePlan
from dispatch.libraries.nvrtc.launching import LaunchPlan, cleared, number_of
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.product_kernels import NAME, SOURCE, options, tile_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

    Kernel = tuple[str, str, tuple[str, ...]]  # a source, the name in it, and NVRTC's options

__all__ = ["plan", "product"]

COUNTER_BYTES = 16  # bytes of the counter of blocks and of the flag for a long row
WORD, NUMBER = 4, 8  # bytes
ALIGNMENT = 256  # bytes: parts of the memory begin at multiples of it
QUARTER = 4  # a block reads a quarter more row ends at once than it has on average
LANES = 32


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request, one launch; for a result without elements it does nothing."""
    if not request.layout_of("out").size:
        return IdlePlan(row, capture_safe=False)
    return product(request, executor, row, lambda chosen: (SOURCE, NAME, chosen))


def product(request: Any, executor: CudaExecutor, row: Row, kernel_of: Callable[[tuple[str, ...]], Kernel]) -> Plan:
    """The plan of a product whose result has elements; `kernel_of` returns the kernel for NVRTC's options."""
    by_columns, dtype = request.form.format == SparseFormat.CSC, request.values.dtype
    offsets, places = ("columns", "rows") if by_columns else ("rows", "columns")
    lines, count = request.layout_of("out").size, request.values.shape[0]
    tile = tile_of(dtype, lines + count)
    blocks = -(-(lines + count) // tile.steps)
    scratch, parts = scratch_of(executor, blocks, max(WORD, dtype.itemsize))
    x_step, y_step, out_step = (strides_of(request, name) for name in ("x", "y", "out"))
    widths = tuple(getattr(request, name).dtype.itemsize for name in (offsets, places))
    conj, strided = getattr(request, "trans", Operation.N) is Operation.C, x_step != 1
    chosen = options(dtype, request.layout_of("out").dtype, widths, tile, conj=conj, strided=strided)
    added = request.place_of("y") if request.reads_added else None
    operands = (*map(request.place_of, ("values", offsets, places, "x")), added, request.place_of("out"))
    first = len(request.reads) + len(request.writes)
    numbers = [(number_of(dtype), first + request.numbers.index(name)) for name in ("alpha", "beta")]
    filled = [*((ctypes.c_void_p(), place) for place in operands), *numbers]
    average = tile.steps * lines // (lines + count)
    ahead = min(average + average // QUARTER + LANES, tile.steps + 1)
    extents = (lines, count, request.form.base, x_step, y_step, out_step)
    arguments = (*map(ctypes.c_int64, extents), ctypes.c_int(ahead), *map(ctypes.c_void_p, parts))
    return LaunchPlan(executor, row, kernel_of(chosen), (blocks, tile.threads), filled, arguments, scratch)


def strides_of(request: Any, name: str) -> int:
    """The stride of a vector; 0 if there is none."""
    if name in request.reads and getattr(request, name) is None:
        return 0
    step: int = request.layout_of(name).strides[0]
    return step


def scratch_of(executor: CudaExecutor, blocks: int, size: int) -> tuple[Tensor, list[int]]:
    """Memory of a plan for so many blocks, each of whose sums has `size` bytes, and the addresses of its parts.

    The parts are the counters and the states of the blocks, which are 0; rows; and two sums of each block.
    """
    counters, *others = (COUNTER_BYTES + WORD * blocks, NUMBER * blocks, size * blocks, size * blocks)
    at, places = 0, []
    for nbytes in (counters, *others):
        places.append(at)
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    scratch = cleared(executor, counters, at - counters)
    return scratch, [scratch.ptr + place for place in places]
