"""BLAS level 3 by cuBLAS: the routines for a request, and whether cuBLAS supports it.

cuBLAS's matrices are column-major. If the result is row-major its transpose is computed: sides and triangles are
exchanged, and two operands change places. First geam copies c to the result, and a kernel of this library the
right-hand sides of `trsm`, unless they are there already.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from dispatch.keys import member
from dispatch.libraries.cublas.calls import (
    SCRATCH,
    Constant,
    Matrices,
    MatrixCopy,
    Operand,
    Routine,
    Scratch,
    Task,
    plan_of,
)
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer, batch_step, matrix_of
from dispatch.ops.blas.arrangements import Arrangement, LayoutGroup, arrange, leading_dimension, misalignment
from dispatch.ops.blas.choices import Operation
from dispatch.ops.blas.lowering import BaseLowering

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["cublas_level3", "lower", "matrices_fit"]

N, T, C = Operation.N, Operation.T, Operation.C
MATRIX = 2  # axes
MIN_SCRATCH_ROWS = 256  # rows of a triangle; with fewer, two copies take as long as they save


def matrices_fit(request: Any) -> str:
    """Rule: matrices with layouts that cuBLAS supports."""
    arrangement = arrangement_of(request)
    if isinstance(arrangement, str):
        return arrangement
    if request.op == "dgmm":
        x = request.x.layout
        if x.size > 1 and x.strides[0] < 1:
            return f"needs x with a stride above 0, has {x}: copy it"
        return misalignment(x)
    return ""


def cublas_level3(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request of level 3; nothing is launched if the result has no element."""
    return plan_of(executor, row, lower(request))


def groups_of(request: Any) -> tuple[LayoutGroup, ...]:
    """The operands with the order of the result, and those that may have the opposite order."""
    added = (LayoutGroup(("c",), is_free=True),) if request.takes_c else ()
    is_complex = getattr(request, request.reads[0]).dtype.is_complex

    def may_transpose(trans: Operation) -> bool:
        return trans is not C or not is_complex  # no operation conjugates without transposing

    match request.op:
        case "symm":
            return (LayoutGroup(("b",), is_free=False), LayoutGroup(("a",), is_free=True), *added)
        case "hemm":
            return (LayoutGroup(("a", "b"), is_free=False), *added)
        case "trmm":
            return (LayoutGroup(("b",), is_free=False), LayoutGroup(("a",), may_transpose(request.trans)))
        case "trsm":
            return (LayoutGroup(("b",), is_free=True), LayoutGroup(("a",), request.may_transpose_a))
        case "geam":
            return (
                LayoutGroup(("a",), may_transpose(request.trans_a)),
                LayoutGroup(("b",), may_transpose(request.trans_b)),
            )
        case "dgmm":
            return (LayoutGroup(("a",), is_free=False),)
    return (LayoutGroup(("a", "b") if "b" in request.reads else ("a",), not request.is_hermitian), *added)


def lower(request: Any) -> list[Task]:
    """The cuBLAS calls for a request, in order."""
    if 0 in request.layout_of("out").shape:
        return []
    arrangement = arrangement_of(request)
    if isinstance(arrangement, str):
        raise AssertionError(arrangement)  # the row's rule refuses such requests
    if request.op == "trsm" and (cheaper := cheaper_arrangement(request, arrangement)):
        return Lowering(request, cheaper).in_scratch()
    return Lowering(request, arrangement).tasks()


def arrangement_of(request: Any) -> Arrangement | str:
    """The arrangement of a request's matrices; a result of `trsm` that is one row or column is solved from the left."""
    return arrange(request, groups_of(request), rows_first=request.op != "trsm" or request.solves_rows)


def cheaper_arrangement(request: Any, found: Arrangement) -> Arrangement | None:
    """The arrangement of `trsm` on a copy of the opposite order, if that saves more time than it costs; otherwise None.

    On an H100 with a matrix of 2048 rows in f32 it took 0.41 ms for one right-hand side from the right and 0.107 ms
    from the left, 0.53 and 0.28 ms for 256, 0.66 and 0.46 ms for 2048; with 4096 rows both took as
    long.
    """
    is_row_major, order = request.solves_rows, request.a.shape[-1]
    sides = request.b.size // order
    if found.out == is_row_major or request.b.ndim > MATRIX or order < MIN_SCRATCH_ROWS or sides > order:
        return None
    for row in (found.rows["a"], is_row_major) if request.may_transpose_a else (is_row_major,):
        if leading_dimension(request.a.layout, row=row) is not None:
            return Arrangement(is_row_major, {**found.rows, "a": row})
    return None


class Lowering(BaseLowering):
    """Derives the routines' arguments from a request and the arrangement of its matrices."""

    def __init__(self, request: Any, arrangement: Arrangement) -> None:
        super().__init__(request)
        self.rows = {**arrangement.rows, "out": arrangement.out}
        self.is_transposed = arrangement.out
        m, n = request.layout_of("out").shape[-2:]
        self.m, self.n = (n, m) if self.is_transposed else (m, n)  # of the result for cuBLAS

    def tasks(self) -> list[Task]:
        """The calls for the request."""
        routine = getattr(self, f"_{self.request.op}", self._rank)
        tasks: list[Task] = routine()
        return tasks

    # -- parts of a call ------------------------------------------------------------------------------------------
    def operand(self, name: str, offset: int = 0) -> tuple[Operand, int]:
        """A matrix and its leading dimension, as all calls pass them."""
        return Operand(self.request.place_of(name), offset), self.ld(name)

    def ld(self, name: str) -> int:
        """The leading dimension of a matrix."""
        layout, row = self.request.layout_of(name), self.rows[name]
        # An empty matrix is not read, but cuBLAS checks that a line fits between two beginnings.
        return max(leading_dimension(layout, row=row) or 1, int(layout.shape[-1 if row else -2]))

    def side(self) -> int:
        """The side of the special matrix: the opposite one if the transpose is computed."""
        side = member(self.request.side)
        return int(side.other if self.is_transposed else side)

    def fill(self, name: str) -> int:
        """The triangle of a matrix for cuBLAS: the opposite one if the matrix is passed as its transpose."""
        uplo = member(self.request.uplo)
        return int(uplo.other if self.rows[name] else uplo)

    def copy_to_out(self, name: str) -> Routine:
        """A copy of an operand to the result, as it is or transposed."""
        operation = T if self.rows[name] != self.is_transposed else N
        one, zero = Constant(1, self.dtype), Constant(0, self.dtype)
        out = self.operand("out")
        arguments = (int(operation), int(N), self.m, self.n, one, *self.operand(name), zero, *out, *out)
        return Routine("geam", self.dtype, arguments, (self.request.place_of(name), self.request.place_of("out")))

    def copy_c(self) -> list[Task]:
        """The calls that copy c to the result if the routine adds to it."""
        return [self.copy_to_out("c")] if self.request.takes_c else []

    # -- the routines ---------------------------------------------------------------------------------------------
    def _symm(self) -> list[Task]:
        arguments = (
            *(self.side(), self.fill("a"), self.m, self.n, self.number("alpha")),
            *(*self.operand("a"), *self.operand("b"), self.number("beta"), *self.operand("out")),
        )
        return [*self.copy_c(), Routine(self.request.op, self.dtype, arguments)]

    _hemm = _symm

    def _rank(self) -> list[Task]:
        request = self.request
        rows, columns = request.a.shape
        k = columns if request.trans is N else rows
        adjoint = C if request.is_hermitian else T
        operation = self.operation(request.trans, turn=self.rows["a"], turned=adjoint)
        names = ("a", "b") if "b" in request.reads else ("a",)
        operands = [part for name in (names[::-1] if self.is_transposed else names) for part in self.operand(name)]
        arguments = (
            *(self.fill("out"), operation, self.n, k, self.number("alpha"), *operands),
            *(self.number("beta"), *self.operand("out")),
        )
        zeroed: list[Task] = [] if request.takes_c else [self._zero_out()]
        return [*zeroed, *self.copy_c(), Routine(request.op, self.dtype, arguments, skip_if=self._keeps_c(k))]

    def _keeps_c(self, k: int) -> tuple[tuple[int, float], ...]:
        """The factors with which the result is exactly c: none if there is no c, or it is not read."""
        if not self.request.reads_added:
            return ()
        beta = (self.number_index("beta"), 1)
        return ((self.number_index("alpha"), 0), beta) if k else (beta,)

    def _zero_out(self) -> Routine:
        """A call that sets the result to 0, because one triangle of it is not written."""
        zero, out = (Constant(0, self.dtype), *self.operand("out")), self.operand("out")
        return Routine("geam", self.dtype, (int(N), int(N), self.m, self.n, *zero, *zero, *out))

    def _triangle(self) -> tuple[Any, ...]:
        """The first arguments of triangular routines, up to alpha."""
        request = self.request
        is_turned = self.rows["a"] != self.is_transposed
        flags = (self.side(), self.fill("a"), self.operation(member(request.trans), turn=is_turned))
        return (*flags, int(request.diag), self.m, self.n, self.number("alpha"))

    def _trmm(self) -> list[Task]:
        arguments = (*self._triangle(), *self.operand("a"), *self.operand("b"), *self.operand("out"))
        return [Routine("trmm", self.dtype, arguments)]

    def _trsm(self) -> list[Task]:
        batch = self.request.b.shape[:-2]
        offsets = {name: self._offsets(name, batch) for name in ("a", "b", "out")}
        tasks = self._right_hand_sides(offsets)
        if len(offsets["out"]) == 1:
            return [*tasks, Routine("trsm", self.dtype, (*self._triangle(), *self.operand("a"), *self.operand("out")))]
        operands = []
        for name in ("a", "out"):
            operands += [Matrices(self.request.place_of(name), offsets[name]), self.ld(name)]
        arguments = (*self._triangle(), *operands, len(offsets["out"]))
        return [*tasks, Routine("trsmBatched", self.dtype, arguments)]

    def _offsets(self, name: str, batch: tuple[int, ...]) -> tuple[int, ...]:
        """The offset of each matrix of the batch from the operand, in bytes."""
        layout = self.request.layout_of(name)
        lacking = len(batch) - (len(layout.shape) - 2)
        axes = zip((1,) * lacking + layout.shape[:-2], (0,) * lacking + layout.strides[:-2], strict=True)
        steps = [0 if extent == 1 else stride * self.dtype.itemsize for extent, stride in axes]
        places = product(*map(range, batch))
        return tuple(sum(i * step for i, step in zip(place, steps, strict=True)) for place in places)

    def _right_hand_sides(self, offsets: dict[str, tuple[int, ...]]) -> list[Task]:
        """The copies of b to the memory that the routine overwrites: one, or one per matrix at unequal distances."""
        pair = [matrix_of(self.request.layout_of(name), self.request.place_of(name)) for name in ("b", "out")]
        axes = slice(0, -MATRIX)
        layouts = [self.request.layout_of(name) for name in ("b", "out")]
        if None not in [batch_step(layout.shape[axes], layout.strides[axes]) for layout in layouts]:
            source, target = pair
            return [MatrixCopy(source, target, len(offsets["out"]))]
        tasks: list[Task] = []
        for places in zip(offsets["b"], offsets["out"], strict=True):
            source, target = (
                matrix._replace(pointer=OperandPointer(matrix.pointer.operand, offset))
                for matrix, offset in zip(pair, places, strict=True)
            )
            tasks.append(MatrixCopy(source, target))
        return tasks

    def in_scratch(self) -> list[Task]:
        """`trsm` in a copy of b with the order of this arrangement, which the result does not have."""
        b, out = (matrix_of(self.request.layout_of(name), self.request.place_of(name)) for name in ("b", "out"))
        row, col = (b.cols, 1) if self.is_transposed else (1, b.rows)
        copy = Matrix(OperandPointer(SCRATCH), self.dtype, b.rows, b.cols, row, col)
        solved = (*self._triangle(), *self.operand("a"), Operand(SCRATCH), self.m)
        nbytes = b.rows * b.cols * self.dtype.itemsize
        return [Scratch(nbytes), MatrixCopy(b, copy), Routine("trsm", self.dtype, solved), MatrixCopy(copy, out)]

    def _geam(self) -> list[Task]:
        request = self.request
        flags = [
            self.operation(member(trans), turn=self.rows[name] != self.is_transposed)
            for name, trans in (("a", request.trans_a), ("b", request.trans_b))
        ]
        a, b = ((self.number(factor), *self.operand(name)) for factor, name in (("alpha", "a"), ("beta", "b")))
        return [Routine("geam", self.dtype, (*flags, self.m, self.n, *a, *b, *self.operand("out")))]

    def _dgmm(self) -> list[Task]:
        x = self.request.x.layout
        side = member(self.request.side)
        mode = side.other if self.is_transposed else side
        step = x.strides[0] if x.size > 1 else 1
        vector = (Operand(self.request.place_of("x")), step)
        arguments = (int(mode), self.m, self.n, *self.operand("a"), *vector, *self.operand("out"))
        return [Routine("dgmm", self.dtype, arguments)]
