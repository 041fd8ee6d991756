"""Sparse linear algebra as calls of cuSPARSE: the steps of a request's plan, and their descriptors.

Follows https://docs.nvidia.com/cuda/cusparse/#cusparse-generic-functions. A dense operand of the other order
is described as the transpose of a matrix of the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.core.matrix_choices import Operation
from dispatch.errors import Refused, WorkerFailed
from dispatch.keys import C64, C128, F32, F64, HALF
from dispatch.libraries.cublas.calls import Constant, Scalar
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusparse.analyses import Solve
from dispatch.libraries.cusparse.calls import PreprocessedCall, Steps
from dispatch.libraries.cusparse.descriptors import DenseMatrix, DenseVector, SparseMatrix, SparseSpec
from dispatch.libraries.cusparse.spgemm import SparseProduct
from dispatch.libraries.cusparse.spgemm_reuse import ReusedProduct
from dispatch.ops.sparse.algorithms import SpmmAlgorithm
from dispatch.ops.sparse.form import SparseForm, SparseFormat, transposed
from dispatch.ops.sparse.rules import leading_dimension
from dispatch.ops.sparse.sparse_products import REUSE_ALGORITHMS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]

N, T, C = Operation.N, Operation.T, Operation.C
PARTS = ("values", "rows", "columns")
SPSV_ALGORITHMS_SINCE = (12, 9, 4)
COMPUTE = {dtype: dtype for dtype in (F32, F64, C64, C128)}


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; with autotune, the plan with the fastest algorithm."""
    if request.autotune and not request.algorithm:
        from dispatch.ops.sparse.tune import fastest_plan  # few requests are tuned

        return fastest_plan(request, executor, lambda tried: PlanMaker(tried, executor, row).plan())
    return PlanMaker(request, executor, row).plan()


class PlanMaker:
    """Makes the plan of a request."""

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        self.request, self.executor = request, executor
        numbers = len(factors_of(request)) + getattr(request, "stamps", 0)
        self.steps = Steps(executor, row, len(request.reads) + len(request.writes) + numbers)
        self.compute = COMPUTE.get(request.values.dtype, F32)
        self.kind = cusparse.cudaDataType(self.compute.cuda)

    def plan(self) -> Plan:
        """The plan, by the request's op."""
        request = self.request
        if all(not request.layout_of(name).size for name in request.writes):
            return self.steps.idle_plan()
        has_terms = request.op != "sddmm" or request.a.shape[1]
        if not (request.values.shape[0] and getattr(request, "b_values", request.values).shape[0] and has_terms):
            return self.without_elements()
        return MAKERS[request.op](self)

    def without_elements(self) -> Plan:
        """The plan for operands without elements: zeros, also as offsets."""
        for name in self.request.writes:
            self.steps.fill_zeros(matrix_at(self.request.layout_of(name), self.request.place_of(name)))
        return self.steps.plan(capture_safe=True)

    # -- operands -----------------------------------------------------------------------------------------------------
    def operation(self, trans: Operation) -> Any:
        """The operation on A; for real matrices the adjoint is the transpose."""
        is_complex = self.request.values.dtype.is_complex
        return cusparse.cusparseOperation_t(int(T if trans is C and not is_complex else trans))

    def factor(self, name: str) -> Scalar | Constant:
        """A factor as an argument; it is 0 in each run if its operand is not read."""
        request = self.request
        if name == "beta" and not request.reads_added:
            return Constant(0.0, self.compute)
        place = len(request.reads) + len(request.writes) + factors_of(request).index(name)
        return Scalar(place, self.compute)

    def sparse_spec(
        self, form: SparseForm, names: tuple[str, str, str], places: Sequence[int] = (), **attributes: int
    ) -> SparseSpec:
        """The description of a sparse matrix whose operands have these names, or of copies at other places."""
        layouts = [self.request.layout_of(name) for name in names]
        values, rows, columns = layouts
        places = places or [self.request.place_of(name) for name in names]
        return SparseSpec(
            int(SparseFormat(form.format)),  # type: ignore[arg-type]  # it is a member since the form was checked
            form.shape,
            values.shape[0],
            form.base,
            form.block,
            values.dtype.cuda,
            rows.dtype.itemsize,
            columns.dtype.itemsize,
            *places,
            **attributes,
        )

    def aligned_places(self, names: Sequence[str], *, result: bool = False) -> list[int]:
        """The places of parts aligned to 16 bytes, as vector loads need: copies if operands are not aligned.

        Parts of a `result` are not copied in: `copy_out` copies them out.
        """
        places = []
        for name in names:
            layout, place = self.request.layout_of(name), self.request.place_of(name)
            part = self.steps.aligned_operand(layout, place)
            if not result:
                self.steps.copy(matrix_at(layout, place), part)
            places.append(part.pointer.operand)
        return places

    def copy_out(self, names: Sequence[str], places: Sequence[int]) -> None:
        """Copy parts of a result from the places that `aligned_places` returned."""
        for name, place in zip(names, places, strict=True):
            target = matrix_at(self.request.layout_of(name), self.request.place_of(name))
            self.steps.copy(matrix_at(self.request.layout_of(name), place), target)

    def product_places(self) -> list[int]:
        """The places of A's parts for SpMV or SpMM: for COO most kernels fault at misaligned ones."""
        request = self.request
        faults = request.op == "sparse_mv" or request.algorithm in (SpmmAlgorithm.DEFAULT, SpmmAlgorithm.COO_ALG3)
        return self.aligned_places(PARTS) if request.form.format == SparseFormat.COO and faults else []

    def sparse_matrix(self, spec: SparseSpec) -> SparseMatrix:
        """The descriptor of a sparse matrix."""
        return SparseMatrix(spec, self.steps.placeholder)

    def dense_vector(self, name: str) -> DenseVector:
        """The descriptor of a dense vector."""
        layout = self.request.layout_of(name)
        return DenseVector(layout.size, layout.dtype.cuda, self.request.place_of(name), self.steps.placeholder)

    def dense_matrix(self, name: str, *, like: bool | None = None) -> tuple[DenseMatrix, Operation]:
        """The descriptor of a dense matrix in a given order, and the operation that this order requires."""
        layout, place = self.request.layout_of(name), self.request.place_of(name)
        wanted = like if like is not None else is_row_major(layout)
        shape, turn, ld = layout.shape, N, leading_dimension(layout, by_rows=wanted)
        if ld is None:  # it is the transpose of one of the wanted order
            shape, turn, ld = shape[::-1], T, leading_dimension(layout, by_rows=not wanted)
        if ld is None:
            raise WorkerFailed(f"{name} is neither row-major nor column-major: {layout}")
        matrix = DenseMatrix(shape, ld, layout.dtype.cuda, place, self.steps.placeholder, by_rows=wanted)
        return matrix, turn

    def copy_added(self, name: str) -> None:
        """Copy the added operand to the result, which the call overwrites."""
        request = self.request
        if request.reads_added:
            source, target = (matrix_at(request.layout_of(one), request.place_of(one)) for one in (name, "out"))
            self.steps.copy(source, target)

    # -- the ops ------------------------------------------------------------------------------------------------------
    def multiply_vector(self) -> Plan:
        """SpMV."""
        request = self.request
        self.copy_added("y")
        a = self.sparse_matrix(self.sparse_spec(request.form, PARTS, self.product_places()))
        arguments = (self.factor("alpha"), a, self.dense_vector("x"), self.factor("beta"), self.dense_vector("out"))
        algorithm = cusparse.cusparseSpMVAlg_t(int(request.algorithm))
        self.steps.call("cusparseSpMV", self.operation(request.trans), *arguments, self.kind, algorithm)
        return self.steps.plan(capture_safe=True)

    def multiply_matrix(self) -> Plan:
        """SpMM; 16-bit sums, which most algorithms round at each addition, are kept in f32 and rounded at the end."""
        request = self.request
        layout, place = request.layout_of("out"), request.place_of("out")
        rounds = layout.dtype in HALF and not request.same_bits
        by_rows = is_row_major(layout)
        sums = self.f32_sums(layout) if rounds else matrix_at(layout, place)
        if rounds and request.reads_added:
            self.steps.copy_rounded(matrix_at(request.layout_of("c"), request.place_of("c")), sums)
        elif not rounds:
            self.copy_added("c")
        a = self.sparse_matrix(self.sparse_spec(request.form, PARTS, self.product_places()))
        if rounds:
            ld, at = max(sums.row_stride, sums.col_stride), (sums.pointer.operand, self.steps.placeholder)
            out = DenseMatrix(layout.shape, ld, F32.cuda, *at, by_rows=by_rows)
        else:
            out, _ = self.dense_matrix("out", like=by_rows)
        b, turn = self.dense_matrix("b", like=by_rows)
        arguments = (self.factor("alpha"), a, b, self.factor("beta"), out, self.kind)
        algorithm = cusparse.cusparseSpMMAlg_t(int(request.algorithm))
        operations = self.operation(request.trans), cusparse.cusparseOperation_t(int(turn))
        self.steps.call("cusparseSpMM", *operations, *arguments, algorithm)
        if rounds:
            self.steps.copy_rounded(sums, matrix_at(layout, place))
        return self.steps.plan(capture_safe=True)

    def f32_sums(self, layout: Layout) -> Matrix:
        """Memory of the plan for a dense matrix in f32, of the order of a result."""
        (m, n), place = layout.shape, self.steps.allocate(layout.size * F32.itemsize)
        return Matrix(OperandPointer(place), F32, m, n, *((n, 1) if is_row_major(layout) else (1, m)))

    def sample(self) -> Plan:
        """SDDMM; without an added operand the result is zeroed first, because 0 times unwritten memory may be NaN.

        It is preprocessed in each run, as torch does: without that an H100 took 1.06 to 1.36 times as long as torch.
        """
        request = self.request
        self.copy_added("values")
        if not request.reads_added:
            self.steps.fill_zeros(matrix_at(request.layout_of("out"), request.place_of("out")))
        c = self.sparse_matrix(self.sparse_spec(request.form, ("out", "rows", "columns")))
        (a, _), (b, _) = self.dense_matrix("a"), self.dense_matrix("b")
        plain = cusparse.cusparseOperation_t(0)
        arguments = (self.factor("alpha"), a, b, self.factor("beta"), c, self.kind)
        algorithm = cusparse.cusparseSDDMMAlg_t.CUSPARSE_SDDMM_ALG_DEFAULT
        self.steps.call("cusparseSDDMM", plain, plain, *arguments, algorithm, kind=PreprocessedCall)
        return self.steps.plan(capture_safe=True)

    def solve(self) -> Plan:
        """SpSV or SpSM; CSC is solved as the transpose of CSR, with the other triangle."""
        request = self.request
        form, trans, uplo, names = request.form, request.trans, request.uplo, PARTS
        if form.format == SparseFormat.CSC:
            other = transposed(form)
            form = form if other is None else other
            trans, uplo, names = (T if trans is N else N), uplo.other, ("values", "columns", "rows")
        a = self.sparse_matrix(self.sparse_spec(form, names, fill=int(uplo), diag=int(request.diag)))
        alpha, operation = self.factor("alpha"), self.operation(trans)
        arguments: tuple[Any, ...]
        if request.op == "spsv":
            self.refuse_before(SPSV_ALGORITHMS_SINCE)
            algorithm = cusparse.cusparseSpSVAlg_t(int(request.algorithm))
            arguments = (operation, alpha, a, self.dense_vector("x"), self.dense_vector("out"), self.kind, algorithm)
            name = "cusparseSpSV"
        else:
            by_rows = is_row_major(request.layout_of("out"))
            out, _ = self.dense_matrix("out", like=by_rows)
            b, turn = self.dense_matrix("b", like=by_rows)
            turned = cusparse.cusparseOperation_t(int(turn))
            default = cusparse.cusparseSpSMAlg_t.CUSPARSE_SPSM_ALG_DEFAULT
            arguments = (operation, turned, alpha, a, b, out, self.kind, default)
            name = "cusparseSpSM"
        keeps = request.form.pattern is not None
        place = request.place_of("values")
        self.steps.append(Solve(self.executor, name, a, arguments, place, keeps=keeps))
        return self.steps.plan(capture_safe=False)

    def refuse_before(self, version: tuple[int, ...]) -> None:
        """Refused for a named algorithm if the library is older than the first one that has it."""
        installed = self.executor.versions.get("cusparse", version)
        if self.request.algorithm and installed < version:
            wanted, has = (".".join(map(str, one)) for one in (version, installed))
            raise Refused(f"{self.request.algorithm.name} needs cuSPARSE {wanted}, has {has}: pass algorithm=None")

    def multiply_sparse(self) -> Plan:
        """SpGEMM, or the number of its elements."""
        request = self.request
        counts = request.op == "spgemm_nnz"
        a = self.sparse_matrix(self.sparse_spec(request.form, PARTS))
        b = self.sparse_matrix(self.sparse_spec(request.b_form, ("b_values", "b_rows", "b_columns")))
        form = SparseForm(SparseFormat.CSR, (request.form.shape[0], request.b_form.shape[1]), request.form.base)
        names = ("b_values", "rows", "columns") if counts else ("out_values", "out_rows", "out_columns")
        spec = self.sparse_spec(form, names)
        plain = cusparse.cusparseOperation_t(0)
        alpha = Constant(request.alpha, self.compute)
        is_empty = not counts and not request.nnz  # SpGEMMreuse is not asked for a product without elements
        choice = 0 if is_empty and request.algorithm in REUSE_ALGORITHMS else int(request.algorithm)
        beta, kind = Constant(0.0, self.compute), self.compute.cuda
        if not counts and request.reuses:
            front = (plain, plain, a, b)
            self.steps.append(ReusedProduct(self.executor, front, (alpha, beta), spec, kind, choice))
            return self.steps.plan(capture_safe=False)
        arguments = (plain, plain, alpha, a, b, beta)
        number = request.place_of("out") if counts else None
        layouts = tuple(request.layout_of(name) for name in request.reads)
        key = (request.form, request.b_form, layouts, request.alpha, choice)
        stamp = len(request.reads) + len(request.writes)
        self.steps.append(SparseProduct(self.executor, arguments, spec, kind, choice, number, stamp=stamp, key=key))
        return self.steps.plan(capture_safe=False)

    def unpack(self) -> Plan:
        """SparseToDense, into zeros, because NVIDIA does not state that it writes them.

        For COO it reads 16 bytes at once, and faults if a part is not aligned to 16 bytes; then an aligned copy is
        used.
        """
        request = self.request
        self.steps.fill_zeros(matrix_at(request.layout_of("out"), request.place_of("out")))
        places = self.aligned_places(PARTS) if request.form.format == SparseFormat.COO else []
        a = self.sparse_matrix(self.sparse_spec(request.form, PARTS, places))
        out, _ = self.dense_matrix("out")
        algorithm = cusparse.cusparseSparseToDenseAlg_t.CUSPARSE_SPARSETODENSE_ALG_DEFAULT
        self.steps.call("cusparseSparseToDense", a, out, algorithm)
        return self.steps.plan(capture_safe=True)

    def exchange(self) -> Plan:
        """Csr2cscEx2 with parts aligned to 16 bytes; CSC is handled as the transpose of CSR.

        A direct call is correct, but a captured one reads beyond its memory when the graph is launched.
        """
        request = self.request
        (m, n), names = request.form.shape, ["values", "rows", "columns"]
        results = ["out_values", "out_columns", "out_rows"]
        if not request.from_csr:
            m, n = n, m
            names, results = ["values", "columns", "rows"], ["out_values", "out_rows", "out_columns"]
        sources, targets = self.aligned_places(names), self.aligned_places(results, result=True)
        places = [OperandPointer(place) for place in (*sources, *targets)]
        choices = (
            cusparse.cudaDataType(request.values.dtype.cuda),
            cusparse.cusparseAction_t.CUSPARSE_ACTION_NUMERIC,
            cusparse.cusparseIndexBase_t(request.form.base),
            cusparse.cusparseCsr2CscAlg_t.CUSPARSE_CSR2CSC_ALG1,
        )
        self.steps.call("cusparseCsr2cscEx2", m, n, request.values.shape[0], *places, *choices)
        self.copy_out(results, targets)
        return self.steps.plan(capture_safe=False)


def factors_of(request: Any) -> tuple[str, ...]:
    """The factors of a request that come after the addresses."""
    names: tuple[str, ...] = getattr(request, "numbers", ())
    return names


def is_row_major(layout: Any) -> bool:
    """Whether a matrix is row-major; one that is also column-major counts as row-major."""
    return leading_dimension(layout, by_rows=True) is not None


def matrix_at(layout: Any, operand: int) -> Matrix:
    """A matrix of any strides, or a vector as a matrix of one column; blocks of BSR are consecutive."""
    shape, strides = layout.shape, layout.strides
    if len(shape) == 2:
        return Matrix(OperandPointer(operand), layout.dtype, *shape, *strides)
    step = strides[0] if len(shape) == 1 else 1
    return Matrix(OperandPointer(operand), layout.dtype, layout.size, 1, step, max(1, layout.size))


MAKERS: dict[str, Callable[[PlanMaker], Plan]] = {
    "sparse_mv": PlanMaker.multiply_vector,
    "spmm": PlanMaker.multiply_matrix,
    "sddmm": PlanMaker.sample,
    "spsv": PlanMaker.solve,
    "spsm": PlanMaker.solve,
    "spgemm": PlanMaker.multiply_sparse,
    "spgemm_nnz": PlanMaker.multiply_sparse,
    "sparse_to_dense": PlanMaker.unpack,
    "csr2csc": PlanMaker.exchange,
}
