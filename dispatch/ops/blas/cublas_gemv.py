"""Matrix-vector products over leading axes by cuBLAS, and those of half precision, which exist only in this form.

Matrices at equal distances use the strided routine, others the routine with pointer arrays. For the adjoint of a
row-major matrix the batched product of matrices is used, as for a single matrix.
"""

from __future__ import annotations

from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.keys import F16, F32, HALF, member
from dispatch.libraries.cublas.calls import Matrices, MatrixCopy, Operand, Routine, Task
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.ops.blas.arrangements import UnsupportedLayout, leading_dimension, misalignment
from dispatch.ops.blas.choices import Operation
from dispatch.ops.blas.lowering import BaseLowering

if TYPE_CHECKING:
    from dispatch.device.layout import Layout
    from dispatch.keys import Dtype

__all__ = ["batched_gemv", "half_function"]

N, C = Operation.N, Operation.C
Shape = tuple[int, ...]


class Batch(NamedTuple):
    """A batched operand: position, offset of the first, leading dimension or stride, strides of the batch."""

    position: int
    offset: int  # in bytes
    step: int
    strides: Shape  # in elements, along each axis of the batch
    itemsize: int

    def distance(self, batch: Shape) -> int | None:
        """The constant distance between matrices in elements; None if it is not constant or is negative."""
        axes = [(extent, stride) for extent, stride in zip(batch, self.strides, strict=True) if extent > 1]
        if not axes:
            return 0
        for (_, outer), (extent, inner) in pairwise(axes):
            if outer != extent * inner:
                return None
        return axes[-1][1] if axes[-1][1] >= 0 else None

    def addresses(self, batch: Shape) -> Matrices:
        """The address of each matrix."""
        steps = [stride * self.itemsize for stride in self.strides]
        places = product(*map(range, batch))
        offsets = (sum(i * step for i, step in zip(place, steps, strict=True)) for place in places)
        return Matrices(self.position, tuple(self.offset + offset for offset in offsets))


def half_function(dtype: Dtype, out: Dtype, routine: str = "gemvStridedBatched") -> str:
    """The name of the half precision routine, without the prefix cublas."""
    letter = "H" if dtype is F16 else "T"
    return f"{letter}S{'S' if out is F32 else letter}{routine}"


def batched_gemv(request: Any) -> list[Task]:
    """The cuBLAS calls; UnsupportedLayout if cuBLAS does not support the operands."""
    return Lowering(request).tasks()


class Lowering(BaseLowering):
    """Derives the routines' arguments from a request."""

    def __init__(self, request: Any) -> None:
        super().__init__(request)
        self.out_layout: Layout = request.layout_of("out")
        self.batch: Shape = self.out_layout.shape[:-1]
        self.count = 1
        for extent in self.batch:
            self.count *= extent

    def operand(self, name: str, axes: int) -> Batch:
        """An operand whose last `axes` axes are not batch axes, with its leading dimension or its step."""
        layout: Layout = self.request.layout_of(name)
        if text := misalignment(layout):
            raise UnsupportedLayout(f"{name}: {text}")
        batch = layout.shape[:-axes]
        lacking = len(self.batch) - len(batch)
        steps = zip(batch, layout.strides[:-axes], strict=True)
        strides = (0,) * lacking + tuple(0 if extent == 1 else step for extent, step in steps)
        place, size = self.request.place_of(name), layout.dtype.itemsize
        if axes == 2:
            return Batch(place, 0, self.line(name, layout), strides, size)
        n, step = layout.shape[-1], layout.strides[-1]
        step = step if n > 1 else 1
        if step == 0:
            raise UnsupportedLayout(f"needs {name} with a stride other than 0, has {layout}: copy it")
        return Batch(place, min(0, (n - 1) * step) * size, step, strides, size)

    def line(self, name: str, layout: Layout) -> int:
        """The leading dimension of a matrix."""
        for is_row in (False, True):
            ld = leading_dimension(layout, row=is_row)
            if ld is not None:
                self.is_row = is_row
                return ld
        expected = f"{name} row-major or column-major, with adjacent elements in each line"
        raise UnsupportedLayout(f"needs {expected}, has {layout}: copy it")

    def tasks(self) -> list[Task]:
        """The copy of y, and the call."""
        request = self.request
        if request.x.shape[-1] == 0:
            raise UnsupportedLayout(
                f"needs a with at least one column if it has leading axes or half precision, has {request.a.layout}"
            )
        operands = [self.operand("a", 2), self.operand("x", 1), self.operand("out", 1)]
        first = self.copy_y() if request.reads_added else []
        rows, columns = request.a.shape[-2:]
        m, n = (columns, rows) if self.is_row else (rows, columns)
        alpha, beta = self.number("alpha"), self.number("beta")
        distances = [operand.distance(self.batch) for operand in operands]
        kind = "Batched" if None in distances else "StridedBatched"
        a, x, out = (
            (operand.addresses(self.batch), operand.step)
            if distance is None or None in distances
            else (Operand(operand.position, operand.offset), operand.step, distance)
            for operand, distance in zip(operands, distances, strict=True)
        )
        if self.is_row and request.trans is C and self.dtype.is_complex:
            for name, operand in (("x", operands[1]), ("out", operands[2])):
                if operand.step < 0:
                    raise UnsupportedLayout(
                        f"needs {name} with a stride above 0, has {request.layout_of(name)}: copy it"
                    )
            flags = (int(N), int(C), 1, columns, rows)
            return [*first, Routine(f"gemm{kind}", self.dtype, (*flags, alpha, *x, *a, beta, *out, self.count))]
        operation = self.operation(member(request.trans), turn=self.is_row)
        arguments = (operation, m, n, alpha, *a, *x, beta, *out, self.count)
        routine = f"gemv{kind}"
        if self.dtype in HALF:
            routine = half_function(self.dtype, self.out_layout.dtype, routine)
        return [*first, Routine(routine, self.dtype, arguments)]

    def copy_y(self) -> list[Task]:
        """A copy of y to the result: one kernel for each index of all batch axes except the last two."""
        y, out = self.operand("y", 1), self.operand("out", 1)
        n, size = self.out_layout.shape[-1], self.out_layout.dtype.itemsize
        *outer, last, inner = (1, 1, *self.batch)
        padded = [(0, 0, *one.strides) for one in (y, out)]
        tasks: list[Task] = []
        for place in product(*map(range, outer)):
            matrices = []
            for one, strides in zip((y, out), padded, strict=True):
                start = sum(i * stride for i, stride in zip(place, strides[:-2], strict=True)) * size
                pointer = OperandPointer(one.position, start, strides[-2] * size)
                matrices.append(Matrix(pointer, self.out_layout.dtype, n, inner, one.step, strides[-1]))
            source, target = matrices
            tasks.append(MatrixCopy(source, target, last))
        return tasks
