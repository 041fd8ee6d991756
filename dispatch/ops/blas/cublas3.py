"""BLAS level 3 in the terms of cuBLAS: the routines that carry out a request, and whether there are such.

cuBLAS's matrices are column-major. Where the result is row-major its transpose is computed: sides and triangles are the
other ones, and of two operands the second comes first. c is copied to the result first by geam, and the right-hand
sides of `trsm` by a kernel of this library, unless they are there already.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from dispatch.keys import member
from dispatch.libraries.cublas.calls import (
    SCRATCH,
    Constant,
    Matrices,
    Moved,
    Operand,
    Routine,
    Scratch,
    Work,
    plan_of,
)
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer, batch_step, matrix_of
from dispatch.ops.blas.choices import Operation
from dispatch.ops.blas.orders import Arrangement, Group, arranged, leading, misplaced
from dispatch.ops.blas.terms import Terms

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["cublas_level3", "lower", "matrices_fit"]

N, T, C = Operation.N, Operation.T, Operation.C
MATRIX = 2  # axes
LEAST_IN_SCRATCH = 256  # rows of a triangle, for fewer of which two copies take as long as they save


def matrices_fit(request: Any) -> str:
    """Rule: matrices that cuBLAS takes as they lie."""
    found = arrangement_of(request)
    if isinstance(found, str):
        return found
    if request.op == "dgmm":
        x = request.x.layout
        if x.size > 1 and x.strides[0] < 1:
            return f"needs x with a stride above 0, has {x}: copy it"
        return misplaced(x)
    return ""


def cublas_level3(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request of level 3; nothing is launched where the result has no element."""
    return plan_of(executor, row, lower(request))


def groups_of(request: Any) -> tuple[Group, ...]:
    """Which operands lie as the result does, and which may lie otherwise."""
    added = (Group(("c",), is_free=True),) if request.takes_c else ()
    is_complex = getattr(request, request.reads[0]).dtype.is_complex

    def turns(trans: Operation) -> bool:
        return trans is not C or not is_complex  # there is no operation that conjugates alone

    match request.op:
        case "symm":
            return (Group(("b",), is_free=False), Group(("a",), is_free=True), *added)
        case "hemm":
            return (Group(("a", "b"), is_free=False), *added)
        case "trmm":
            return (Group(("b",), is_free=False), Group(("a",), turns(request.trans)))
        case "trsm":
            return (Group(("b",), is_free=True), Group(("a",), request.turns_a))
        case "geam":
            return (Group(("a",), turns(request.trans_a)), Group(("b",), turns(request.trans_b)))
        case "dgmm":
            return (Group(("a",), is_free=False),)
    return (Group(("a", "b") if "b" in request.reads else ("a",), not request.is_hermitian), *added)


def lower(request: Any) -> list[Work]:
    """What cuBLAS is to do for a request, in order."""
    if 0 in request.layout_of("out").shape:
        return []
    found = arrangement_of(request)
    if isinstance(found, str):
        raise AssertionError(found)  # the row's rule has refused it
    if request.op == "trsm" and (other := fewer_by_rows(request, found)):
        return Lowering(request, other).in_scratch()
    return Lowering(request, found).works()


def arrangement_of(request: Any) -> Arrangement | str:
    """How a request's matrices are taken; a result of `trsm` that is one line is solved from the left."""
    return arranged(request, groups_of(request), rows_first=request.op != "trsm" or request.solves_rows)


def fewer_by_rows(request: Any, found: Arrangement) -> Arrangement | None:
    """How `trsm` takes a copy that lies the other way, if that saves more than it takes; else None.

    With a matrix of 2048 rows in f32 it took 0.41 ms for one right side from the right and 0.107 ms from the left on an
    H100, 0.53 and 0.28 ms for 256, 0.66 and 0.46 ms for 2048; of 4096 rows both took as long.
    """
    wanted, order = request.solves_rows, request.a.shape[-1]
    sides = request.b.size // order
    if found.out == wanted or request.b.ndim > MATRIX or order < LEAST_IN_SCRATCH or sides > order:
        return None
    for row in (found.rows["a"], wanted) if request.turns_a else (wanted,):
        if leading(request.a.layout, row=row) is not None:
            return Arrangement(wanted, {**found.rows, "a": row})
    return None


class Lowering(Terms):
    """A request and how its matrices lie, from which the routines' arguments follow."""

    def __init__(self, request: Any, arrangement: Arrangement) -> None:
        super().__init__(request)
        self.rows = {**arrangement.rows, "out": arrangement.out}
        self.is_turned = arrangement.out
        m, n = request.layout_of("out").shape[-2:]
        self.m, self.n = (n, m) if self.is_turned else (m, n)  # of the result as cuBLAS has it

    def works(self) -> list[Work]:
        """What is to be done."""
        routine = getattr(self, f"_{self.request.op}", self._rank)
        found: list[Work] = routine()
        return found

    # -- parts of a call ------------------------------------------------------------------------------------------
    def at(self, name: str, offset: int = 0) -> tuple[Operand, int]:
        """A matrix and its leading dimension, as they stand in all calls."""
        return Operand(self.request.place_of(name), offset), self.ld(name)

    def ld(self, name: str) -> int:
        """The elements from line to line of a matrix."""
        return leading(self.request.layout_of(name), row=self.rows[name]) or 1  # of an empty one nothing is read

    def side(self) -> int:
        """The side of the special matrix: the other one where the transpose is computed."""
        side = member(self.request.side)
        return int(side.other if self.is_turned else side)

    def fill(self, name: str) -> int:
        """The triangle of a matrix as cuBLAS has it: the other one where that is its transpose."""
        uplo = member(self.request.uplo)
        return int(uplo.other if self.rows[name] else uplo)

    def copied(self, name: str) -> Routine:
        """The matrix of an operand copied to the result, as it is or transposed."""
        turn = T if self.rows[name] != self.is_turned else N
        one, zero = Constant(1, self.dtype), Constant(0, self.dtype)
        out = self.at("out")
        arguments = (int(turn), int(N), self.m, self.n, one, *self.at(name), zero, *out, *out)
        return Routine("geam", self.dtype, arguments, (self.request.place_of(name), self.request.place_of("out")))

    def added(self) -> list[Work]:
        """What puts c where the routine adds to it."""
        return [self.copied("c")] if self.request.takes_c else []

    # -- the routines ---------------------------------------------------------------------------------------------
    def _symm(self) -> list[Work]:
        arguments = (
            *(self.side(), self.fill("a"), self.m, self.n, self.number("alpha")),
            *(*self.at("a"), *self.at("b"), self.number("beta"), *self.at("out")),
        )
        return [*self.added(), Routine(self.request.op, self.dtype, arguments)]

    _hemm = _symm

    def _rank(self) -> list[Work]:
        request = self.request
        rows, columns = request.a.shape
        k = columns if request.trans is N else rows
        adjoint = C if request.is_hermitian else T
        operation = self.operation(request.trans, turn=self.rows["a"], turned=adjoint)
        names = ("a", "b") if "b" in request.reads else ("a",)
        operands = [part for name in (names[::-1] if self.is_turned else names) for part in self.at(name)]
        arguments = (
            *(self.fill("out"), operation, self.n, k, self.number("alpha"), *operands),
            *(self.number("beta"), *self.at("out")),
        )
        blank: list[Work] = [] if request.takes_c else [self._blank()]
        return [*blank, *self.added(), Routine(request.op, self.dtype, arguments, unless=self._leaves_c(k))]

    def _leaves_c(self, k: int) -> tuple[tuple[int, float], ...]:
        """The factors with which the result is c to the last bit: none where there is no c, or it is not read."""
        if not self.request.reads_c:
            return ()
        beta = (self.place_of_number("beta"), 1)
        return ((self.place_of_number("alpha"), 0), beta) if k else (beta,)

    def _blank(self) -> Routine:
        """The result set to 0, of which a triangle is not written."""
        zero, out = (Constant(0, self.dtype), *self.at("out")), self.at("out")
        return Routine("geam", self.dtype, (int(N), int(N), self.m, self.n, *zero, *zero, *out))

    def _triangle(self) -> tuple[Any, ...]:
        """What triangular routines begin with, up to alpha."""
        request = self.request
        turn = self.rows["a"] != self.is_turned
        flags = (self.side(), self.fill("a"), self.operation(member(request.trans), turn=turn))
        return (*flags, int(request.diag), self.m, self.n, self.number("alpha"))

    def _trmm(self) -> list[Work]:
        arguments = (*self._triangle(), *self.at("a"), *self.at("b"), *self.at("out"))
        return [Routine("trmm", self.dtype, arguments)]

    def _trsm(self) -> list[Work]:
        batch = self.request.b.shape[:-2]
        offsets = {name: self._offsets(name, batch) for name in ("a", "b", "out")}
        works = self._right_hand_sides(offsets)
        if len(offsets["out"]) == 1:
            return [*works, Routine("trsm", self.dtype, (*self._triangle(), *self.at("a"), *self.at("out")))]
        operands = []
        for name in ("a", "out"):
            operands += [Matrices(self.request.place_of(name), offsets[name]), self.ld(name)]
        arguments = (*self._triangle(), *operands, len(offsets["out"]))
        return [*works, Routine("trsmBatched", self.dtype, arguments)]

    def _offsets(self, name: str, batch: tuple[int, ...]) -> tuple[int, ...]:
        """How many bytes behind the operand each matrix of the batch begins."""
        layout = self.request.layout_of(name)
        lacking = len(batch) - (len(layout.shape) - 2)
        axes = zip((1,) * lacking + layout.shape[:-2], (0,) * lacking + layout.strides[:-2], strict=True)
        steps = [0 if extent == 1 else stride * self.dtype.itemsize for extent, stride in axes]
        places = product(*map(range, batch))
        return tuple(sum(i * step for i, step in zip(place, steps, strict=True)) for place in places)

    def _right_hand_sides(self, offsets: dict[str, tuple[int, ...]]) -> list[Work]:
        """What puts b where the routine overwrites it: one copy where batches lie at equal distances, else of each."""
        pair = [matrix_of(self.request.layout_of(name), self.request.place_of(name)) for name in ("b", "out")]
        axes = slice(0, -MATRIX)
        layouts = [self.request.layout_of(name) for name in ("b", "out")]
        if None not in [batch_step(layout.shape[axes], layout.strides[axes]) for layout in layouts]:
            source, target = pair
            return [Moved(source, target, len(offsets["out"]))]
        works: list[Work] = []
        for places in zip(offsets["b"], offsets["out"], strict=True):
            source, target = (
                matrix._replace(pointer=OperandPointer(matrix.pointer.operand, offset))
                for matrix, offset in zip(pair, places, strict=True)
            )
            works.append(Moved(source, target))
        return works

    def in_scratch(self) -> list[Work]:
        """`trsm` in a copy of b that lies as this arrangement has it, which the result does not."""
        b, out = (matrix_of(self.request.layout_of(name), self.request.place_of(name)) for name in ("b", "out"))
        row, col = (b.cols, 1) if self.is_turned else (1, b.rows)
        room = Matrix(OperandPointer(SCRATCH), self.dtype, b.rows, b.cols, row, col)
        solved = (*self._triangle(), *self.at("a"), Operand(SCRATCH), self.m)
        nbytes = b.rows * b.cols * self.dtype.itemsize
        return [Scratch(nbytes), Moved(b, room), Routine("trsm", self.dtype, solved), Moved(room, out)]

    def _geam(self) -> list[Work]:
        request = self.request
        flags = [
            self.operation(member(trans), turn=self.rows[name] != self.is_turned)
            for name, trans in (("a", request.trans_a), ("b", request.trans_b))
        ]
        a, b = ((self.number(factor), *self.at(name)) for factor, name in (("alpha", "a"), ("beta", "b")))
        return [Routine("geam", self.dtype, (*flags, self.m, self.n, *a, *b, *self.at("out")))]

    def _dgmm(self) -> list[Work]:
        x = self.request.x.layout
        side = member(self.request.side)
        mode = side.other if self.is_turned else side
        step = x.strides[0] if x.size > 1 else 1
        vector = (Operand(self.request.place_of("x")), step)
        arguments = (int(mode), self.m, self.n, *self.at("a"), *vector, *self.at("out"))
        return [Routine("dgmm", self.dtype, arguments)]
