"""Plans of a sparse matrix times a dense one, or of a batch of such products, by the kernel of semiring_kernels.py.

It is one launch, after a copy of B if its rows are not contiguous and copying costs less than reading B as it is. The
partial sums that blocks exchange, and counters that are 0 between launches, are memory of the plan, as in
own_product.py.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.matrix_choices import Operation
from dispatch.errors import Refused
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import IdlePlan, Steps
from dispatch.libraries.cusparse.operator_source import KERNEL_OPTIONS
from dispatch.libraries.nvrtc.launching import LaunchPlan, LaunchStep, cleared, number_of
from dispatch.libraries.nvrtc.number_types import WIDEST
from dispatch.ops.sparse.batched_rules import nnz_of
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.plain_operators import BatchStrides, plain_operators, words
from dispatch.ops.sparse.semiring_kernels import NAME, THREADS, source
from dispatch.ops.sparse.semiring_tiles import shape_of, tile_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["COMPUTE", "DenseOperand", "launch", "plan"]

COMPUTE = {dtype: dtype for dtype in (F32, F64, C64, C128)}
COUNTER, PART = 4, 256  # bytes: of a counter, and the alignment of sums
PARTIAL_SUMS = 2  # of a block: of a row that began in an earlier block, and of one that continues in the next
MAX_BLOCKS = 2**31 - 1  # of a launch
MATRIX = 2  # axes
# From so many columns on, B is copied to row-major if it is column-major, provided that A has at least one element for
# each row of B. Each element of a column-major B that a row of A reads is in another sector of 32 bytes; in a row-major
# B few sectors are read.
COPIED_COLUMNS = 4


class Launch(NamedTuple):
    """The arguments of `LaunchPlan` and `LaunchStep`; `scratch` is memory of the plan."""

    kernel: tuple[str, str, tuple[str, ...]]
    extents: tuple[int, int]
    filled: list[tuple[Any, int | None]]
    arguments: tuple[Any, ...]
    scratch: Tensor | None

    def plan(self, executor: CudaExecutor, row: Row) -> Plan:
        """The plan of this launch alone."""
        return LaunchPlan(executor, row, self.kernel, self.extents, self.filled, self.arguments, self.scratch)


class DenseOperand(NamedTuple):
    """B as the kernel reads it: its layout, and its place among the addresses of a run."""

    layout: Layout
    place: int


class LaunchWithScratch(LaunchStep):
    """A launch as a step of a plan, which keeps the memory of the blocks' partial sums."""

    __slots__ = ("_scratch",)

    def __init__(self, executor: CudaExecutor, launched: Launch) -> None:
        super().__init__(executor, launched.kernel, launched.extents, launched.filled, launched.arguments)
        self._scratch = launched.scratch


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    layout, place = request.layout_of("b"), request.place_of("b")
    if not request.layout_of("out").size:
        return IdlePlan(row, capture_safe=False)
    compute = COMPUTE.get(request.values.dtype, F32)
    if not is_copied(request):
        return launch(request, executor, plain_operators(compute), DenseOperand(layout, place)).plan(executor, row)
    steps = Steps(executor, row, len(request.reads) + len(request.writes) + len(request.numbers))
    b = row_major_copy(request, steps, layout, place)
    steps.append(LaunchWithScratch(executor, launch(request, executor, plain_operators(compute), b)))
    return steps.plan(capture_safe=True)


def is_copied(request: Any) -> bool:
    """Whether B is copied, to make its rows contiguous."""
    layout: Layout = request.layout_of("b")
    lines, columns = layout.shape[-MATRIX:]
    return layout.strides[-1] != 1 and columns >= COPIED_COLUMNS and nnz_of(request) >= lines


def row_major_copy(request: Any, steps: Steps, layout: Layout, place: int) -> DenseOperand:
    """A row-major copy of B, or of each B of a batch, in memory of the plan; a shared B is copied once."""
    (lines, columns), (row, column) = layout.shape[-MATRIX:], layout.strides[-MATRIX:]
    stride, item = batch_stride(layout, MATRIX), layout.dtype.itemsize
    batch, size = layout.shape[0] if stride else 1, lines * columns
    target = OperandPointer(steps.allocate(batch * size * item), batch_stride=size * item)
    copied = Matrix(OperandPointer(place, batch_stride=stride * item), layout.dtype, lines, columns, row, column)
    steps.copy(copied, Matrix(target, layout.dtype, lines, columns, columns, 1), batch)
    shape, strides = layout.shape, (*(() if len(layout.shape) == MATRIX else (size if stride else 0,)), columns, 1)
    return DenseOperand(request.device.layout(layout.dtype, shape, strides, WIDEST), target.operand)


def launch(request: Any, executor: CudaExecutor, operators: str, b: DenseOperand) -> Launch:
    """One launch, of so many blocks for each part of B's columns in each product; Refused for too many blocks."""
    form, dtype, out = request.form, request.values.dtype, request.layout_of("out")
    by_columns = form.format == SparseFormat.CSC
    offsets, places = ("columns", "rows") if by_columns else ("rows", "columns")
    added = out if request.c is None else request.layout_of("c")
    compute, batch = COMPUTE.get(dtype, F32), out.shape[0] if len(out.shape) > MATRIX else 1
    (rows, columns), count = out.shape[-MATRIX:], nnz_of(request)
    tile = tile_of(rows, count, columns, batch)
    vector = vector_width(b.layout, WIDEST // compute.itemsize)
    shape = shape_of(vector, columns, tile.element_lanes)
    blocks, tiles = -(-(rows + count) // tile.steps), -(-columns // shape.wide)
    parts = tiles * batch
    if blocks * parts > MAX_BLOCKS:
        raise Refused(f"needs at most {MAX_BLOCKS:,} blocks of {tile.steps} rows and elements, has {blocks * parts:,}")
    widths = getattr(request, offsets).dtype.itemsize, getattr(request, places).dtype.itemsize
    wide = is_vectorizable(added, vector), is_vectorizable(out, vector)
    numbers = getattr(request, "numbers", ())
    conj = getattr(request, "trans", Operation.N) is Operation.C and dtype.is_complex
    more = words(conj=conj, batched=batch > 1) if numbers else {}
    text = source(operators, (dtype, out.dtype), widths, tile, shape, wide, more)
    # Rows are split where blocks end; a single block splits none.
    scratch, sums = None, 0
    if blocks > 1:
        counters = -(-COUNTER * blocks * parts // PART) * PART
        scratch = cleared(executor, counters, PARTIAL_SUMS * blocks * parts * shape.wide * compute.itemsize)
        sums = scratch.ptr + counters
    is_read = request.reads_added if numbers else request.c is not None
    operands = (*map(request.place_of, ("values", offsets, places)), b.place)
    operands = (*operands, request.place_of("c") if is_read else None, request.place_of("out"))
    first = len(request.reads) + len(request.writes)
    filled = [(ctypes.c_void_p(), place) for place in operands]
    filled += [(number_of(compute), first + place) for place, _ in enumerate(numbers)]
    strides = [step for layout in (b.layout, added, out) for step in layout.strides[-MATRIX:]]
    extents = map(ctypes.c_int64, (rows, count, form.base, columns, *strides))
    memory = map(ctypes.c_void_p, (None if scratch is None else scratch.ptr, sums or None))
    arguments = (*extents, ctypes.c_int(blocks), *memory)
    if batch > 1:
        vectors = (batch_stride(request.layout_of(name), 1) for name in ("values", offsets, places))
        batch_strides = BatchStrides(*vectors, *(batch_stride(layout, MATRIX) for layout in (b.layout, added, out)))
        arguments = (*arguments, ctypes.c_int(tiles), batch_strides)
    return Launch((text, NAME, KERNEL_OPTIONS), (blocks * parts, THREADS), filled, arguments, scratch)


def batch_stride(layout: Layout, axes: int) -> int:
    """The stride in elements from one matrix of a batch to the next, 0 if it is shared; a matrix has so many `axes`."""
    return layout.strides[0] if len(layout.shape) > axes and layout.shape[0] > 1 else 0


def vector_width(layout: Layout, most: int) -> int:
    """The largest number of neighbouring columns that one load may read, with all rows aligned to it."""
    vector = most
    while not is_vectorizable(layout, vector):
        vector //= 2
    return vector


def is_vectorizable(layout: Layout, vector: int) -> bool:
    """Whether rows are contiguous and aligned so that one load or store can access so many neighbouring elements."""
    if vector == 1:
        return True
    *lines, columns = zip(layout.shape, layout.strides, strict=True)
    nbytes = min(WIDEST, vector * layout.dtype.itemsize)
    steady = all(extent <= 1 or not line % vector for extent, line in lines)
    return columns[1] == 1 and steady and not columns[0] % vector and not layout.alignment % nbytes
