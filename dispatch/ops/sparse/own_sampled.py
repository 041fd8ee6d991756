"""Plans of SDDMM by the kernel of sampled_kernels.py, after copies of operands whose terms are not adjacent.

A batch is also one launch.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.calls import Steps
from dispatch.libraries.nvrtc.launching import LaunchStep, number_of
from dispatch.libraries.nvrtc.number_types import WIDEST
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.own_matrix import batch_stride
from dispatch.ops.sparse.sampled_kernels import NAME, SOURCE, THREADS, options

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["BatchStrides", "DenseOperand", "load_widths", "plan", "sampling_step"]

MIN_LANES, MAX_LANES = 4, 32
LOADS = 2  # the least number of loads per lane, for each row and column
ONE_MATRIX, ONE_VECTOR = 2, 1  # axes, without that of a batch


class BatchStrides(ctypes.Structure):
    """The strides in elements from one matrix of a batch to the next, as the kernel takes them."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("added", "owners", "places", "x", "y", "out"))


class DenseOperand(NamedTuple):
    """A dense operand, whose lines hold the terms of one sum each; `place` is its place among the addresses."""

    place: int
    line: int  # elements from one line to the next
    alignment: int
    apart: int = 0  # elements from one matrix of a batch to the next


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request."""
    steps = Steps(executor, row, len(request.reads) + len(request.writes) + len(request.numbers))
    if not request.layout_of("out").size:
        return steps.idle_plan()
    by_columns = request.form.format == SparseFormat.CSC
    names = ("b", "a") if by_columns else ("a", "b")  # the operand along the pattern's lines, and the other one
    sides = [dense_operand(request, steps, name) for name in names]
    steps.append(sampling_step(request, executor, sides[0], sides[1]))
    return steps.plan(capture_safe=True)


def dense_operand(request: Any, steps: Steps, name: str) -> DenseOperand:
    """An operand as it is if the terms of a sum are adjacent, else a copy in which they are."""
    layout, place = request.layout_of(name), request.place_of(name)
    (lines, terms), (line, step) = layout.shape[-ONE_MATRIX:], layout.strides[-ONE_MATRIX:]
    if name == "b":
        lines, terms, line, step = terms, lines, step, line
    stride, item = batch_stride(layout, ONE_MATRIX), layout.dtype.itemsize
    if step == 1 or terms <= 1:
        return DenseOperand(place, line, layout.alignment, stride)
    batch = layout.shape[0] if stride else 1
    target = OperandPointer(steps.allocate(batch * lines * terms * item), batch_stride=lines * terms * item)
    source = Matrix(OperandPointer(place, batch_stride=stride * item), layout.dtype, lines, terms, line, step)
    steps.copy(source, Matrix(target, layout.dtype, lines, terms, terms, 1), batch)
    return DenseOperand(target.operand, terms, WIDEST, lines * terms if stride else 0)


def load_widths(request: Any, x: DenseOperand, y: DenseOperand) -> tuple[int, int]:
    """The number of elements that a lane reads at once, and the lanes of a group."""
    item, terms = request.values.dtype.itemsize, request.a.shape[-1]
    vector = max(1, WIDEST // item)
    while vector > 1 and (
        any(one.alignment % (vector * item) or one.line % vector or one.apart % vector for one in (x, y))
        or terms % vector
    ):
        vector //= 2
    lanes = MIN_LANES
    while lanes < MAX_LANES and lanes * vector * LOADS < terms:
        lanes *= 2
    return vector, lanes


def sampling_step(request: Any, executor: CudaExecutor, x: DenseOperand, y: DenseOperand) -> LaunchStep:
    """One launch, as a step of a plan."""
    form, dtype = request.form, request.values.dtype
    by_columns, pairs = form.format == SparseFormat.CSC, form.format == SparseFormat.COO
    owners, places = ("columns", "rows") if by_columns else ("rows", "columns")
    out, terms = request.layout_of("out"), request.a.shape[-1]
    vector, lanes = load_widths(request, x, y)
    line_bytes, place_bytes = (getattr(request, name).dtype.itemsize for name in (owners, places))
    batched = len(out.shape) > ONE_VECTOR
    kernel = SOURCE, NAME, options(dtype, line_bytes, place_bytes, vector, lanes, batched=batched)
    added = request.place_of("values") if request.reads_added else None
    operands = (added, *map(request.place_of, (owners, places)), x.place, y.place, request.place_of("out"))
    first = len(request.reads) + len(request.writes)
    numbers = [(number_of(dtype), first + request.numbers.index(name)) for name in ("alpha", "beta")]
    filled = [*((ctypes.c_void_p(), place) for place in operands), *numbers]
    extents = (out.shape[-1], form.shape[1 if by_columns else 0], terms, x.line, y.line, form.base)
    vectors = [batch_stride(request.layout_of(name), ONE_VECTOR) for name in ("values", owners, places, "out")]
    strides = BatchStrides(*vectors[:3], x.apart, y.apart, vectors[3])
    batch = ctypes.c_int64(out.shape[0] if batched else 1)
    arguments = (*map(ctypes.c_int64, extents), ctypes.c_int(pairs), batch, strides)
    return LaunchStep(executor, kernel, (-(-out.size // THREADS), THREADS), filled, arguments)
