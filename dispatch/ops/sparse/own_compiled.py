"""Plans of products with a caller's operators by kernels that these are compiled into: one launch each.

What blocks leave for each other, and the counters that are 0 between two launches, are memory of the plan, as
own_product.py has it.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind.errors import NvrtcError
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusparse.calls import IdlePlan
from dispatch.libraries.cusparse.operator_source import OPTIONS_OF_KERNELS, epilogue_beside
from dispatch.libraries.nvrtc.launching import LaunchPlan, cleared
from dispatch.libraries.nvrtc.number_types import WIDEST
from dispatch.ops.sparse import product_kernels
from dispatch.ops.sparse.own_product import product
from dispatch.ops.sparse.semiring_kernels import NAME, THREADS, source
from dispatch.ops.sparse.semiring_tiles import shape_of, tile_of
from dispatch.ops.sparse.uncompiled import operators_of, uncompiled

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

COMPUTE = {dtype: dtype for dtype in (F32, F64, C64, C128)}
COUNTER, PART = 4, 256  # bytes of a counter; sums begin at multiples of the other
SIDES = 2  # pieces that a block may leave: of a row that began before it, and of one that goes on behind it


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; BadRequest, with the line, for operators that do not compile."""
    if not request.layout_of("out").size:
        return IdlePlan(row, capture_safe=False)
    try:
        if request.op == "spmm_op":
            return over_semiring(request, executor, row)
        return product(request, executor, row, lambda chosen: with_epilogue(request, chosen))
    except NvrtcError as error:
        raise uncompiled(request, error) from error


def with_epilogue(request: Any, chosen: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    """The kernel of a product with a vector, with an epilogue in it.

    What NVRTC is told by options elsewhere stands behind the caller's lines, so that these see no names of the kernel.
    """
    if request.epilogue is None:
        return product_kernels.SOURCE, product_kernels.NAME, chosen
    words = (option.removeprefix("-D").replace("=", " ", 1) for option in chosen if option.startswith("-D"))
    defined = "".join(f"#define {word}\n" for word in (*words, "FINISHED operators::of_row"))
    lines = epilogue_beside(COMPUTE.get(request.values.dtype, F32), request.epilogue.code)
    return lines + defined + product_kernels.SOURCE, product_kernels.NAME, OPTIONS_OF_KERNELS


def over_semiring(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """One launch, of so many blocks for each part of B's columns."""
    layouts = {name: request.layout_of(name) for name in ("b", "out")}
    layouts["c"] = layouts["out"] if request.c is None else request.layout_of("c")
    rows, count, columns = request.form.shape[0], request.values.shape[0], layouts["out"].shape[1]
    dtype, compute = request.values.dtype, COMPUTE.get(request.values.dtype, F32)
    tile = tile_of(rows, count, columns)
    vector = neighbours_of(layouts["b"], WIDEST // compute.itemsize)
    shape = shape_of(vector, columns, tile.element_lanes)
    blocks, parts = -(-(rows + count) // tile.steps), -(-columns // shape.wide)
    widths = request.rows.dtype.itemsize, request.columns.dtype.itemsize
    wide = fits(layouts["c"], vector), fits(layouts["out"], vector)
    operators = operators_of(request, compute).together()
    text = source(operators, (dtype, layouts["out"].dtype), widths, tile, shape, wide)
    # A row is cut where blocks end; of one block there is no end within.
    scratch, sums = None, 0
    if blocks > 1:
        counters = -(-COUNTER * blocks * parts // PART) * PART
        scratch = cleared(executor, counters, SIDES * blocks * parts * shape.wide * compute.itemsize)
        sums = scratch.ptr + counters
    added = None if request.c is None else request.place_of("c")
    operands = (*map(request.place_of, ("values", "rows", "columns", "b")), added, request.place_of("out"))
    filled = [(ctypes.c_void_p(), place) for place in operands]
    strides = [step for name in ("b", "c", "out") for step in layouts[name].strides]
    extents = map(ctypes.c_int64, (rows, count, request.form.base, columns, *strides))
    memory = map(ctypes.c_void_p, (None if scratch is None else scratch.ptr, sums or None))
    given = (*extents, ctypes.c_int(blocks), *memory)
    return LaunchPlan(
        executor, row, (text, NAME, OPTIONS_OF_KERNELS), (blocks * parts, THREADS), filled, given, scratch
    )


def neighbours_of(layout: Layout, most: int) -> int:
    """As many neighbouring columns as a load may have, which all rows have at multiples of them."""
    vector = most
    while not fits(layout, vector):
        vector //= 2
    return vector


def fits(layout: Layout, vector: int) -> bool:
    """Whether rows are so many neighbouring elements again and again, each where one load or store may have them."""
    if vector == 1:
        return True
    (rows, columns), (line, step) = layout.shape, layout.strides
    nbytes = min(WIDEST, vector * layout.dtype.itemsize)
    steady = rows <= 1 or not line % vector
    return step == 1 and steady and not columns % vector and not layout.alignment % nbytes
