"""BLAS level 2 by cuBLAS: the routines for a request, and whether cuBLAS supports it.

cuBLAS's matrices are column-major. A row-major matrix is passed as its transpose, which a flag undoes. But no flag
undoes the conjugate that a Hermitian matrix or an adjoint needs in addition. Then the vectors are treated as matrices
of one row, and the equivalent level 3 routine is applied to the transpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import HALF, member
from dispatch.libraries.cublas.calls import Constant, Operand, Routine, Task, plan_of
from dispatch.ops.blas.arrangements import UnsupportedLayout, leading_dimension, misalignment
from dispatch.ops.blas.choices import Operation, SideMode
from dispatch.ops.blas.cublas_gemv import batched_gemv
from dispatch.ops.blas.lowering import BaseLowering

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["cublas_level2", "lower", "vectors_fit"]

N, T, C = Operation.N, Operation.T, Operation.C
RIGHT = int(SideMode.RIGHT)


def vectors_fit(request: Any) -> str:
    """Rule: vectors and matrices with layouts that cuBLAS supports."""
    try:
        lower(request)
    except UnsupportedLayout as misfit:
        return str(misfit)
    return ""


def cublas_level2(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request of level 2; nothing is launched if the result has no element."""
    return plan_of(executor, row, lower(request))


def lower(request: Any) -> list[Task]:
    """The cuBLAS calls for a request, in order; UnsupportedLayout if cuBLAS does not support the operands."""
    if 0 in request.layout_of("out").shape:
        return []
    return Lowering(request).tasks()


class Vectors(BaseLowering):
    """Derives the vector arguments of cuBLAS from a request."""

    def layout(self, name: str) -> Layout:
        layout: Layout = self.request.layout_of(name)
        if text := misalignment(layout):
            raise UnsupportedLayout(f"{name}: {text}")
        return layout

    def vector(self, name: str) -> tuple[Operand, int]:
        """A vector and its step; for a negative step the address is that of the last element, the lowest one."""
        layout = self.layout(name)
        step = layout.strides[0] if layout.size > 1 else 1
        if step == 0:
            raise UnsupportedLayout(f"needs {name} with a stride other than 0, has {layout}: copy it")
        return Operand(self.request.place_of(name), layout.low if step < 0 else 0), step

    def copy_to_out(self, name: str) -> list[Task]:
        """A copy of a vector to the result, unless it is the result."""
        place = self.request.place_of
        count = self.request.layout_of("out").size
        arguments = (count, *self.vector(name), *self.vector("out"))
        return [Routine("copy", self.dtype, arguments, (place(name), place("out")))]


class Lowering(Vectors):
    """Derives the routines' arguments from a request."""

    def tasks(self) -> list[Task]:
        """The calls for the request."""
        routines: dict[str, Callable[[], list[Task]]] = {
            "gemv": self._gemv,
            "gbmv": self._gbmv,
            **dict.fromkeys(("symv", "hemv", "sbmv", "hbmv", "spmv", "hpmv"), self._symmetric),
            **dict.fromkeys(("trmv", "trsv", "tbmv", "tbsv", "tpmv", "tpsv"), self._triangle),
            **dict.fromkeys(("ger", "geru", "gerc"), self._outer),
            **dict.fromkeys(("syr", "her", "syr2", "her2"), self._symmetric_outer),
            **dict.fromkeys(("spr", "hpr", "spr2", "hpr2"), self._packed_outer),
        }
        return routines[self.request.op]()

    # -- operands -------------------------------------------------------------------------------------------------
    def as_row(self, name: str) -> tuple[Operand, int]:
        """A vector as a matrix of one row, and its leading dimension."""
        operand, step = self.vector(name)
        if step < 0:
            raise UnsupportedLayout(f"needs {name} with a stride above 0, has {self.layout(name)}: copy it")
        return operand, step

    def matrix(self, name: str) -> tuple[bool, tuple[Operand, int]]:
        """Whether a matrix is row-major, its operand and its leading dimension."""
        layout = self.layout(name)
        for is_row in (False, True):
            ld = leading_dimension(layout, row=is_row)
            if ld is not None or layout.size == 0:
                return is_row, (Operand(self.request.place_of(name)), ld or 1)
        expected = f"{name} row-major or column-major, with adjacent elements in each line"
        raise UnsupportedLayout(f"needs {expected}, has {layout}: copy it")

    def band(self) -> tuple[Operand, int]:
        """The diagonals and their leading dimension."""
        layout = self.layout("ab")
        ld = leading_dimension(layout, row=False)
        if ld is None and layout.size:
            raise UnsupportedLayout(
                f"needs ab column-major, has {layout}: use ab.mT.copy().mT, or dev.array(…) of the transpose"
            )
        return Operand(self.request.place_of("ab")), ld or max(layout.shape[0], 1)

    def packed(self, name: str) -> Operand:
        """A packed triangle."""
        layout = self.layout(name)
        if layout.size > 1 and layout.strides != (1,):
            raise UnsupportedLayout(f"needs {name} dense, has {layout}: copy it")
        return Operand(self.request.place_of(name))

    def call(self, routine: str, *arguments: Any) -> Routine:
        return Routine(routine, self.dtype, arguments)

    def call_with_alpha(self, routine: str, *arguments: Any) -> Routine:
        """A call that is skipped if alpha is 0: the result then stays exactly unchanged, whatever the routine does."""
        return Routine(routine, self.dtype, arguments, skip_if=((self.number_index("alpha"), 0),))

    def fill(self, *, row: bool = False) -> int:
        """The triangle for cuBLAS: the opposite one for a row-major matrix."""
        uplo = member(self.request.uplo)
        return int(uplo.other if row else uplo)

    @property
    def n(self) -> int:
        """The length of x."""
        n: int = self.request.x.shape[0]
        return n

    # -- before the routine ---------------------------------------------------------------------------------------
    def copy_y(self) -> list[Task]:
        """A copy of y to the result, if y is read."""
        return self.copy_to_out("y") if self.request.reads_added else []

    def scale_y(self) -> list[Task]:
        """Only beta · y, or 0: the result of a product with no terms."""
        count, zero, out = self.request.layout_of("out").size, Constant(0, self.dtype), self.as_row("out")
        first = (self.number("beta"), *self.as_row("y")) if self.request.reads_added else (zero, *out)
        return [self.call("geam", int(N), int(N), 1, count, *first, zero, *out, *out)]

    def prepare_out(self) -> tuple[bool, tuple[Operand, int], list[Task]]:
        """The result of an outer product: whether it is row-major, its operand, and the calls that initialize it."""
        is_row, out = self.matrix("out")
        rows, columns = self.request.layout_of("out").shape
        m, n = (columns, rows) if is_row else (rows, columns)
        one, zero = Constant(1, self.dtype), Constant(0, self.dtype)
        if not self.request.has_added:
            return is_row, out, [self.call("geam", int(N), int(N), m, n, zero, *out, zero, *out, *out)]
        was_row, a = self.matrix("a")
        if leading_dimension(self.layout("a"), row=is_row) is not None:
            was_row, a = is_row, (a[0], leading_dimension(self.layout("a"), row=is_row) or 1)
        places = (self.request.place_of("a"), self.request.place_of("out"))
        arguments = (int(N if was_row == is_row else T), int(N), m, n, one, *a, zero, *out, *out)
        return is_row, out, [Routine("geam", self.dtype, arguments, places)]

    # -- a matrix times a vector ----------------------------------------------------------------------------------
    def _gemv(self) -> list[Task]:
        if self.dtype in HALF or len(self.request.layout_of("out").shape) > 1:
            return batched_gemv(self.request)
        if self.n == 0:
            return self.scale_y()
        is_row, a = self.matrix("a")
        rows, columns = self.request.a.shape
        m, n = (columns, rows) if is_row else (rows, columns)
        alpha, beta = self.number("alpha"), self.number("beta")
        if is_row and self.request.trans is C and self.dtype.is_complex:
            vectors = (alpha, *self.as_row("x"), *a, beta, *self.as_row("out"))
            return [*self.copy_y(), self.call("gemm", int(N), int(C), 1, columns, rows, *vectors)]
        operation = self.operation(member(self.request.trans), turn=is_row)
        operands = (alpha, *a, *self.vector("x"), beta, *self.vector("out"))
        return [*self.copy_y(), self.call("gemv", operation, m, n, *operands)]

    def _gbmv(self) -> list[Task]:
        request = self.request
        if self.n == 0:
            return self.scale_y()
        shape = (request.rows, request.ab.shape[1], request.kl, request.ku)
        operands = (self.number("alpha"), *self.band(), *self.vector("x"), self.number("beta"), *self.vector("out"))
        operation = self.operation(member(request.trans), turn=False)
        return [*self.copy_y(), self.call("gbmv", operation, *shape, *operands)]

    def _symmetric(self) -> list[Task]:
        alpha, beta, op = self.number("alpha"), self.number("beta"), self.request.op
        if "ab" in self.request.reads:
            a: tuple[Any, ...] = (self.fill(), self.n, self.request.ab.shape[0] - 1, alpha, *self.band())
        elif "ap" in self.request.reads:
            a = (self.fill(), self.n, alpha, self.packed("ap"))
        else:
            is_row, matrix = self.matrix("a")
            if is_row and op == "hemv":
                vectors = (*self.as_row("x"), beta, *self.as_row("out"))
                flags = (RIGHT, self.fill(row=True), 1, self.n)
                return [*self.copy_y(), self.call("hemm", *flags, alpha, *matrix, *vectors)]
            a = (self.fill(row=is_row), self.n, alpha, *matrix)
        return [*self.copy_y(), self.call(op, *a, *self.vector("x"), beta, *self.vector("out"))]

    # -- a triangle with a vector ---------------------------------------------------------------------------------
    def _triangle(self) -> list[Task]:
        request, diag = self.request, int(self.request.diag)
        first, operation = self.copy_to_out("x"), self.operation(member(request.trans), turn=False)
        if "ab" in request.reads:
            a: tuple[Any, ...] = (self.n, request.ab.shape[0] - 1, *self.band())
        elif "ap" in request.reads:
            a = (self.n, self.packed("ap"))
        else:
            is_row, matrix = self.matrix("a")
            if is_row and request.trans is C and self.dtype.is_complex:
                flags = (RIGHT, self.fill(row=True), int(C), diag, 1, self.n, Constant(1, self.dtype))
                out = self.as_row("out")
                where = (*out, *out) if request.op == "trmv" else out  # for trmm both the operand and the result
                return [*first, self.call(request.op.replace("v", "m"), *flags, *matrix, *where)]
            operation = self.operation(member(request.trans), turn=is_row)
            return [
                *first,
                self.call(request.op, self.fill(row=is_row), operation, diag, self.n, *matrix, *self.vector("out")),
            ]
        return [*first, self.call(request.op, self.fill(), operation, diag, *a, *self.vector("out"))]

    # -- outer products -------------------------------------------------------------------------------------------
    def _outer(self) -> list[Task]:
        is_row, out, first = self.prepare_out()
        m, n = self.request.layout_of("out").shape
        alpha = self.number("alpha")
        if not is_row:
            return [*first, self.call(self.request.op, m, n, alpha, *self.vector("x"), *self.vector("y"), *out)]
        if self.request.op == "gerc":
            vectors = (alpha, *self.as_row("y"), *self.as_row("x"), Constant(1, self.dtype))
            return [*first, self.call("gemm", int(C), int(N), n, m, 1, *vectors, *out)]
        return [*first, self.call(self.request.op, n, m, alpha, *self.vector("y"), *self.vector("x"), *out)]

    def _symmetric_outer(self) -> list[Task]:
        is_row, out, first = self.prepare_out()
        op, alpha, one = self.request.op, self.number("alpha"), Constant(1, self.real)
        names = ("x", "y") if "y" in self.request.reads else ("x",)
        if is_row and op.startswith("he"):
            vectors = [part for name in reversed(names) for part in self.as_row(name)]
            flags = (self.fill(row=True), int(C), self.n, 1, alpha)
            return [*first, self.call_with_alpha(f"{op}k", *flags, *vectors, one, *out)]
        vectors = [part for name in names for part in self.vector(name)]
        return [*first, self.call_with_alpha(op, self.fill(row=is_row), self.n, alpha, *vectors, *out)]

    def _packed_outer(self) -> list[Task]:
        names = ("x", "y") if "y" in self.request.reads else ("x",)
        out, zero = self.packed("out"), Constant(0, self.dtype)
        if self.request.has_added:
            self.packed("ap")
            first = self.copy_to_out("ap")
        else:
            count = self.request.layout_of("out").size
            first = [self.call("geam", int(N), int(N), 1, count, zero, out, 1, zero, out, 1, out, 1)]
        vectors = [part for name in names for part in self.vector(name)]
        arguments = (self.fill(), self.n, self.number("alpha"), *vectors, out)
        return [*first, self.call_with_alpha(self.request.op, *arguments)]
