"""Products with the caller's operators as calls of cuSPARSE: SpMMOp and SpMVOp.

SpMMOp works on memory of the plan, in which all operands are dense and B and C are row-major, which NVIDIA says is
faster. Operands of any strides are copied there; those of 16 bits are converted to f32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.errors import NvrtcError
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.compiled_product import CompiledProduct, EmptyRows, RowProduct, compile_to_lto
from dispatch.libraries.cusparse.descriptors import DenseMatrix, DenseVector
from dispatch.libraries.cusparse.operator_source import row_epilogue_source
from dispatch.ops.sparse.caller_operators import compile_error, operators_of
from dispatch.ops.sparse.cusparse import PARTS, PlanMaker, matrix_at

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; BadRequest, with the line, for operators that do not compile."""
    try:
        return CompiledPlanMaker(request, executor, row).plan()
    except NvrtcError as error:
        raise compile_error(request, error) from error


class CompiledPlanMaker(PlanMaker):
    """Makes the plan of a product with the caller's operators."""

    def plan(self) -> Plan:
        if not self.request.layout_of("out").size:
            return self.steps.idle_plan()
        return self.multiply_over_semiring() if self.request.op == "spmm_op" else self.multiply_with_epilogue()

    # -- SpMMOp -------------------------------------------------------------------------------------------------------
    def multiply_over_semiring(self) -> Plan:
        """Copies to the plan's memory, the product, the rows that it does not write, and a copy to the result."""
        request, arch = self.request, str(self.executor.device.arch)
        operators = operators_of(request, self.compute)
        code = compile_to_lto(operators.sources(), arch)
        parts = {name: self.copy_in(name) for name in PARTS}
        places = [parts[name].pointer.operand for name in PARTS]
        b, out = self.copy_in("b"), self.allocate_operand("out")
        if request.c is not None:
            self.copy(matrix_at(request.layout_of("c"), request.place_of("c")), out)
        elif operators.epilogue is not None:
            self.steps.fill_zeros(out)
        spec = self.sparse_spec(request.form, PARTS, places)._replace(value_type=self.compute.cuda)
        matrices = [self.sparse_matrix(spec), *(self.row_major_matrix(one) for one in (b, out))]
        product = CompiledProduct(self.executor, matrices, self.kind, code)
        self.steps.append(product)
        self.steps.append(EmptyRows(self.executor, operators.empty_rows_source(), parts["rows"], out))
        self.copy(out, matrix_at(request.layout_of("out"), request.place_of("out")))
        plan = self.steps.plan(capture_safe=False)
        product.bind(plan.addresses((0,) * (len(request.reads) + len(request.writes))))
        return plan

    def allocate_operand(self, name: str) -> Matrix:
        """Memory of the plan for an operand, dense, in the compute dtype."""
        layout = self.request.layout_of(name)
        dtype = layout.dtype if name in ("rows", "columns") else self.compute
        place = OperandPointer(self.steps.allocate(layout.size * dtype.itemsize))
        rows, cols = layout.shape if len(layout.shape) > 1 else (layout.size, 1)
        return Matrix(place, dtype, rows, cols, cols, 1)

    def copy_in(self, name: str) -> Matrix:
        """Copy an operand to memory of the plan."""
        target = self.allocate_operand(name)
        self.copy(matrix_at(self.request.layout_of(name), self.request.place_of(name)), target)
        return target

    def copy(self, source: Matrix, target: Matrix) -> None:
        """A copy, in the target's dtype."""
        if source.dtype is target.dtype:
            self.steps.copy(source, target)
        else:
            self.steps.copy_rounded(source, target)

    def row_major_matrix(self, matrix: Matrix) -> DenseMatrix:
        """The descriptor of a dense row-major matrix in memory of the plan."""
        shape, placeholder = (matrix.rows, matrix.cols), self.steps.placeholder
        place, kind = matrix.pointer.operand, self.compute.cuda
        return DenseMatrix(shape, max(1, matrix.cols), kind, place, placeholder, by_rows=True)

    # -- SpMVOp -------------------------------------------------------------------------------------------------------
    def multiply_with_epilogue(self) -> Plan:
        """A · x and the added operand, in memory that is separate from the result, aligned for vector loads.

        If the added operand was in the memory of the result, cuSPARSE 12.9.4 did not support f32 (on an H200). It did
        with separate memory, at multiples of 256 bytes.
        """
        request, steps = self.request, self.steps
        code = None
        if request.epilogue is not None:
            source = row_epilogue_source(self.compute, request.epilogue.code)
            code = compile_to_lto({"spmvop_epilogue": source}, str(self.executor.device.arch))["spmvop_epilogue"]
        added = self.allocate_operand("out")
        if request.reads_added:
            steps.copy(matrix_at(request.layout_of("y"), request.place_of("y")), added)
        else:  # 0 times unwritten memory may be NaN
            steps.fill_zeros(added)
        a = self.sparse_matrix(self.sparse_spec(request.form, PARTS, self.aligned_places(PARTS)))
        x, out = *self.aligned_places(("x",)), *self.aligned_places(("out",), result=True)
        vectors = [
            self.dense_vector_at("x", x),
            self.dense_vector_at("out", added.pointer.operand),
            self.dense_vector_at("out", out),
        ]
        factors = self.factor("alpha"), self.factor("beta")
        keeps = request.form.pattern is not None
        steps.append(RowProduct(self.executor, (a, *vectors), factors, self.kind, code, keeps=keeps))
        self.copy_out(("out",), (out,))
        return steps.plan(capture_safe=False)

    def dense_vector_at(self, name: str, place: int) -> DenseVector:
        """The descriptor of a dense vector like an operand, at another place."""
        layout = self.request.layout_of(name)
        return DenseVector(layout.size, layout.dtype.cuda, place, self.steps.placeholder)
