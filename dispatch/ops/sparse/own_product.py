"""Plans of a sparse matrix times a vector by the kernel of product_kernels.py: one launch.

What blocks leave for the last one, and the counters that are 0 between two launches, are memory of the plan. Its runs
are on one stream, one after another; other plans have memory of their own.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.matrix_choices import Operation
from dispatch.core.request import Plan
from dispatch.keys import F64, U8
from dispatch.libraries.cusolver.copies import check
from dispatch.libraries.cusparse.calls import IdlePlan
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.product_kernels import NAME, REAL, SOURCE, options, tile_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

DONE = 16  # bytes of the counter of blocks, and of whether there is a long row
WORD, NUMBER = 4, 8  # bytes
PART = 256  # bytes: parts of the memory begin at multiples of it
QUARTER = 4  # by so much more row ends are read at once than a block has on average
LANES = 32


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; of a result without elements nothing is to be done."""
    if not request.layout_of("out").size:
        return IdlePlan(row, capture_safe=False)
    return ProductPlan(request, executor, row)


class ProductPlan(Plan):
    """One launch, for the addresses and numbers of each run."""

    __slots__ = ("_executor", "_given", "_launch", "_numbers", "_scratch", "_slots")

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        by_columns, dtype = request.form.format == SparseFormat.CSC, request.values.dtype
        offsets, places = ("columns", "rows") if by_columns else ("rows", "columns")
        lines, count = request.layout_of("out").size, request.values.shape[0]
        tile = tile_of(dtype, lines + count)
        blocks = -(-(lines + count) // tile.steps)
        self._scratch, parts = scratch_of(executor, blocks, max(WORD, dtype.itemsize))
        x_step, y_step, out_step = (strides_of(request, name) for name in ("x", "y", "out"))
        widths = tuple(getattr(request, name).dtype.itemsize for name in (offsets, places))
        conj, strided = request.trans is Operation.C, x_step != 1
        chosen = options(dtype, request.layout_of("out").dtype, widths, tile, conj=conj, strided=strided)
        added = request.place_of("y") if request.reads_added else None
        operands = (*map(request.place_of, ("values", offsets, places, "x")), added, request.place_of("out"))
        self._slots = [(ctypes.c_void_p(), place) for place in operands]
        real: Any = ctypes.c_double if REAL.get(dtype, dtype) is F64 else ctypes.c_float
        first = len(request.reads) + len(request.writes)
        self._numbers = [
            ((real * (2 if dtype.is_complex else 1))(), first + request.numbers.index(name))
            for name in ("alpha", "beta")
        ]
        average = tile.steps * lines // (lines + count)
        ahead = min(average + average // QUARTER + LANES, tile.steps + 1)
        extents = (lines, count, request.form.base, x_step, y_step, out_step)
        taken = (one for one, _ in (*self._slots, *self._numbers))
        self._given = (*taken, *map(ctypes.c_int64, extents), ctypes.c_int(ahead), *map(ctypes.c_void_p, parts))
        pointers = (ctypes.c_void_p * len(self._given))(*map(ctypes.addressof, self._given))
        function = ctypes.c_void_p(loaded(SOURCE, NAME, chosen, executor.device))
        fixed = (function, blocks, 1, 1, tile.threads, 1, 1, 0, executor.target, pointers, None)
        self._launch: Callable[[], int] = partial(driver.cuLaunchKernel.unchecked, *fixed)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Launch it."""
        given: Any = arguments
        for slot, place in self._slots:
            slot.value = None if place is None else given[place] or None
        for number, place in self._numbers:
            factor = given[place]
            number[:] = (factor.real, factor.imag)[: len(number)]
        check(self._executor, self._launch())


def strides_of(request: Any, name: str) -> int:
    """How many elements lie from one of a vector to the next; 0 of one that is not there."""
    if name in request.reads and getattr(request, name) is None:
        return 0
    step: int = request.layout_of(name).strides[0]
    return step


def scratch_of(executor: CudaExecutor, blocks: int, size: int) -> tuple[Tensor, list[int]]:
    """Memory of a plan for so many blocks, whose sums have `size` bytes, and the addresses of its parts.

    Counters and the blocks' states, which are 0; rows; and two sums of each.
    """
    counters, *others = (DONE + WORD * blocks, NUMBER * blocks, size * blocks, size * blocks)
    at, places = 0, []
    for nbytes in (counters, *others):
        places.append(at)
        at += -(-nbytes // PART) * PART
    scratch = executor.empty((at,), (1,), U8)
    # A plan is made outside of what its caller captures, and of what the executor records.
    driver.cuMemsetD8Async(scratch.ptr, 0, counters, executor.stream.c_handle.value)
    return scratch, [scratch.ptr + place for place in places]
