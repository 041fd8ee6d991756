"""Products with operators of the caller's as calls of cuSPARSE: SpMMOp and SpMVOp.

SpMMOp is over memory of the plan's own, where all is dense and B and C are row-major, which NVIDIA says is faster;
operands of any strides are copied there, and those of 16 bits become f32 on the way.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from cudabind.errors import NvrtcError
from dispatch.errors import BadRequest
from dispatch.libraries.cusolver.matrix import Matrix, Place
from dispatch.libraries.cusparse.compiled_product import CompiledProduct, EmptyRows, RowProduct, linked_code
from dispatch.libraries.cusparse.descriptors import DenseMatrix
from dispatch.libraries.cusparse.operator_source import Operators, epilogue_of_rows
from dispatch.ops.sparse.cusparse import PARTS, Making, lines_of

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["plan"]

LINE = re.compile(r"^(multiply|add|epilogue)\((\d+)\): (?:error|catastrophic error)[^:]*: (.*)$", re.MULTILINE)
FOUND = {"multiply": "a and b", "add": "a and b", "epilogue": "sum and c"}


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; BadRequest, with the line, for operators that do not compile."""
    try:
        return MakingCompiled(request, executor, row).plan()
    except NvrtcError as error:
        raise uncompiled(request, error) from error


class MakingCompiled(Making):
    """A request whose plan is made."""

    def plan(self) -> Plan:
        if not self.request.layout_of("out").size:
            return self.steps.idle()
        return self.over_semiring() if self.request.op == "spmm_op" else self.with_epilogue()

    # -- SpMMOp -------------------------------------------------------------------------------------------------------
    def over_semiring(self) -> Plan:
        """Copies into the plan's memory, the product, the rows that it leaves out, and a copy out of it."""
        request, arch = self.request, str(self.executor.device.arch)
        semiring = request.ring
        multiply, add, epilogue = (None if one is None else one.code for one in
                                   (semiring.multiply, semiring.add, semiring.epilogue))  # fmt: skip
        operators = Operators(
            self.compute, str(multiply), str(add), epilogue, semiring.identity, adds=request.c is not None
        )
        code = linked_code(operators.sources(), arch)
        parts = {name: self.taken(name) for name in PARTS}
        places = [parts[name].place.operand for name in PARTS]
        b, out = self.taken("b"), self.own("out")
        if request.c is not None:
            self.move(lines_of(request.layout_of("c"), request.place_of("c")), out)
        elif epilogue is not None:
            self.steps.zeros(out)
        said = self.sparse(request.form, PARTS, places)._replace(value_type=self.compute.cuda)
        matrices = [self.matrix(said), *(self.by_rows(one) for one in (b, out))]
        product = CompiledProduct(self.executor, matrices, self.kind, code)
        self.steps.append(product)
        self.steps.append(EmptyRows(self.executor, operators.of_empty_rows(), parts["rows"], out))
        self.move(out, lines_of(request.layout_of("out"), request.place_of("out")))
        made = self.steps.plan(capture_safe=False)
        product.bind(made.addresses((0,) * (len(request.reads) + len(request.writes))))
        return made

    def own(self, name: str) -> Matrix:
        """Memory of the plan's own for an operand, dense, in what is computed in."""
        layout = self.request.layout_of(name)
        dtype = layout.dtype if name in ("rows", "columns") else self.compute
        place = Place(self.steps.room(layout.size * dtype.itemsize))
        rows, cols = layout.shape if len(layout.shape) > 1 else (layout.size, 1)
        return Matrix(place, dtype, rows, cols, cols, 1)

    def taken(self, name: str) -> Matrix:
        """The copy of an operand in the plan's own memory."""
        target = self.own(name)
        self.move(lines_of(self.request.layout_of(name), self.request.place_of(name)), target)
        return target

    def move(self, source: Matrix, target: Matrix) -> None:
        """A copy, in the target's dtype."""
        if source.dtype is target.dtype:
            self.steps.copy(source, target)
        else:
            self.steps.rounded(source, target)

    def by_rows(self, matrix: Matrix) -> DenseMatrix:
        """The descriptor of a dense matrix in the plan's own memory."""
        shape, placeholder = (matrix.rows, matrix.cols), self.steps.placeholder
        place, kind = matrix.place.operand, self.compute.cuda
        return DenseMatrix(shape, max(1, matrix.cols), kind, place, placeholder, by_rows=True)

    # -- SpMVOp -------------------------------------------------------------------------------------------------------
    def with_epilogue(self) -> Plan:
        """A · x into what is added, which lies where the result is to be."""
        request = self.request
        code = None
        if request.epilogue is not None:
            source = epilogue_of_rows(self.compute, request.epilogue.code)
            code = linked_code({"spmvop_epilogue": source}, str(self.executor.device.arch))["spmvop_epilogue"]
        self.added("y")
        if not request.reads_added:  # 0 times what nobody has written may be NaN
            self.steps.zeros(lines_of(request.layout_of("out"), request.place_of("out")))
        a = self.matrix(self.sparse(request.form, PARTS, self.at_vectors(PARTS)))
        front = (a, self.vector("x"), self.vector("out"), self.vector("out"))
        factors = self.number("alpha"), self.number("beta")
        self.steps.append(RowProduct(self.executor, front, factors, self.kind, code))
        return self.steps.plan(capture_safe=False)


def uncompiled(request: Any, error: NvrtcError) -> BadRequest | NvrtcError:
    """The caller's line that the compiler complains of, as an error about the operator; else the compiler's own."""
    found = LINE.search(error.log or "")
    if found is None:
        return error
    name, of_rows = found.group(1), request.op == "spmv_op"
    operator = request.epilogue if of_rows else getattr(request.ring, name)
    if operator is None:
        return error
    lines = operator.code.rstrip().splitlines()
    number = min(int(found.group(2)), len(lines))  # what the last line lacks is told of the next
    place = name if of_rows else f"semiring.{name}"
    given = f"{place}.code, of which line {number}, `{lines[number - 1].strip()}`, does not compile: {found.group(3)}"
    names = "row and x" if of_rows else FOUND[name]
    return BadRequest(place, given, f"CUDA C++ that returns a Number; it has {names}", _hint(request.values.dtype))


def _hint(dtype: Dtype) -> str:
    return "complex numbers have no < and no >" if dtype.is_complex else ""
