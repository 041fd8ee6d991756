"""Plans of the iterations: a graph whose while node repeats a product by cuSPARSE and the kernels of a method.

All vectors of an iteration are memory of the plan, so that a graph depends on the addresses of A alone. The addresses
of b, x0, M and the results are parameters of its first and its last kernel, and are set if they change. The loop body
reads incomplete factors and inverses of blocks in M, so a graph depends on their address, too.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind import driver
from cudabind.sys import cusparse
from dispatch.core.request import Plan
from dispatch.errors import Refused, WorkerFailed
from dispatch.execute.while_graph import MIN_DRIVER, Launched, WhileGraph
from dispatch.libraries.cublas.calls import Constant
from dispatch.libraries.cusolver.matrix import OperandPointer
from dispatch.libraries.cusparse.calls import Call
from dispatch.libraries.cusparse.descriptors import DenseVector, SparseMatrix, SparseSpec
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.krylov import Preconditioner
from dispatch.ops.sparse.krylov_factors import TriangularSolves
from dispatch.ops.sparse.krylov_kernels import IN, SOLVED, SOLVES, SOURCES, VECTORS, Q, passes
from dispatch.ops.sparse.wide_numbers import WIDE_BYTES, number_options

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["IterationLayout", "SolveParameters", "options", "plan"]

THREADS, MAX_BLOCKS = 256, 256
STATE_BYTES = 256
MAX_GRAPHS = 4  # of a plan; each is for one set of addresses of A
ALIGNMENT = 256
TYPES = {4: "int", 8: "long long"}
M = 5  # the index of the argument
# The addresses that the loop body uses: for the product, and for the solves with the factors.
VALUES, ROWS, COLUMNS, INPUT, OUTPUT, BUFFER, FACTORS, SOURCE, TARGET = range(9)


class SolveParameters(ctypes.Structure):
    """The structure `Solve` of krylov_kernels.py, which each kernel takes."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("vectors", "state", "tables", "partial", "values", "lines", "places"),
                *("b", "start", "scale", "out", "info", "iterations", "residual"),
            )
        ),
        *((name, ctypes.c_int64) for name in ("n", "stride", "base", "block_step", "row_step", "column_step")),
        *((name, ctypes.c_double) for name in ("rtol", "atol")),
        *((name, ctypes.c_int) for name in ("limit", "restart", "has_scale", "block")),
    )


def options(request: Any, threads: int = THREADS) -> tuple[str, ...]:
    """NVRTC's options for the kernels of a method."""
    line_bytes, place_bytes = (getattr(request, name).dtype.itemsize for name in index_operands(request))
    words = {
        **number_options(request.values.dtype),
        "THREADS": str(threads),
        "LINE": TYPES[line_bytes],
        "PLACE": TYPES[place_bytes],
        "INDEFINITE": str(int(request.op == "minres")),
        "FACTORED": str(int(request.is_factored)),
        "BLOCKED": str(int(request.is_blocked)),
    }
    return ("-std=c++17", *(f"-D{name}={word}" for name, word in words.items()))


class IterationLayout:
    """The layout of an iteration's memory: the sizes of its parts, and the parameters of kernels over it."""

    def __init__(self, request: Any, threads: int = THREADS, most_blocks: int = MAX_BLOCKS) -> None:
        self.request, kind = request, request.values.dtype
        self.n = request.form.shape[0]
        self.restart = request.length if request.op == "gmres" else 0
        wide, m = WIDE_BYTES[kind.is_complex], self.restart
        self.blocks = max(1, min(most_blocks, -(-self.n // threads)))
        self.stride = -(-self.n * kind.itemsize // ALIGNMENT) * ALIGNMENT // kind.itemsize
        tables = (m * m + 6 * m + 3) * wide
        partial = self.blocks * max(2, m + 1) * wide
        count = VECTORS[request.op] + (m + 1 if m else 0)
        ends = [STATE_BYTES]
        for nbytes in (tables, partial, count * self.stride * kind.itemsize):
            ends.append(ends[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        self.starts, self.nbytes = (0, *ends[:-1]), ends[-1]

    def parameters(self, base: int) -> SolveParameters:
        """The parameters of kernels over memory at an address, without operands."""
        request = self.request
        state, tables, partial, vectors = (base + start for start in self.starts)
        has_diagonal = request.M is not None and not (request.is_factored or request.is_blocked)
        has_scale = has_diagonal or request.preconditioner is Preconditioner.JACOBI
        steps = request.M.layout.strides if request.is_blocked else (0, 0, 0)
        return SolveParameters(
            vectors=vectors, state=state, tables=tables, partial=partial,
            n=self.n, stride=self.stride, base=request.form.base,
            **dict(zip(("block_step", "row_step", "column_step"), steps, strict=True)),
            rtol=request.rtol, atol=request.atol, limit=request.limit, restart=self.restart, has_scale=has_scale,
            block=request.M.shape[-1] if request.is_blocked else 0,
        )  # fmt: skip

    def vector(self, base: int, number: int) -> int:
        """The address of one vector."""
        nbytes: int = number * self.stride * self.request.values.dtype.itemsize
        return base + self.starts[-1] + nbytes


def index_operands(request: Any) -> tuple[str, str]:
    """The operands that hold the offsets and the indices of a matrix."""
    return ("columns", "rows") if request.form.format == SparseFormat.CSC else ("rows", "columns")


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; Refused for drivers without while nodes."""
    if driver.cuDriverGetVersion() < MIN_DRIVER:
        raise Refused("needs a driver of CUDA 12.4 or later, for a while node in a graph")
    return KrylovPlan(request, executor, row)


class LoopBody(Plan):
    """The work that the while node repeats, to be recorded."""

    __slots__ = ("_executor", "_multiply", "_steps")

    def __init__(
        self, row: Row, executor: CudaExecutor, multiply: Call, steps: tuple[Launched | TriangularSolves, ...]
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._multiply, self._steps = executor, multiply, steps

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        self._multiply.enqueue(arguments)
        for one in self._steps:
            if isinstance(one, TriangularSolves):
                one.enqueue()
                continue
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(one.parameters))
            extents = (one.blocks, 1, 1, one.threads, 1, 1, 0)
            status = driver.cuLaunchKernel.unchecked(
                ctypes.c_void_p(one.function), *extents, self._executor.target, parameters, None
            )
            if status:
                raise driver.error("cuLaunchKernel", status)


class KrylovPlan(Plan):
    """One launch of a graph, which is created for the first run with some addresses of A."""

    __slots__ = (
        "_begin", "_buffer", "_executor", "_finish", "_graphs", "_keeps", "_layout", "_lines", "_matrix",
        "_memory", "_multiply", "_reads_m", "_steps",
    )  # fmt: skip

    def __init__(self, request: Any, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor, self._layout = executor, IterationLayout(request)
        self._lines = tuple(request.place_of(name) for name in index_operands(request))
        self._keeps = request.form.pattern is not None and request.form.format == SparseFormat.CSR
        chosen = options(request)
        names = ("begin", "finish", *(name for name in passes(request) if name != SOLVES))
        functions = {name: loaded(SOURCES[request.op], name, chosen, executor.device) for name in names}
        self._begin, self._finish = functions["begin"], functions["finish"]
        self._steps = tuple(functions.get(name) for name in passes(request))  # None for the solves
        self._reads_m = request.is_factored or request.is_blocked  # whether the loop body reads M
        self._memory = executor.device.allocate(self._layout.nbytes, executor.stream)
        self._matrix = matrix_spec(request)
        self._multiply, size = spmv_call(request, executor, self._matrix)
        self._buffer = executor.device.allocate(max(1, size), executor.stream)
        self._graphs: dict[tuple[Any, ...], tuple[WhileGraph, TriangularSolves | None, tuple[Any, ...]]] = {}
        state: Any = self._memory.base
        driver.cuMemsetD8Async(state, 0, STATE_BYTES, executor.target.value)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for memory in (self._memory, self._buffer):
            if memory.owner is not self._executor.stream:
                # Created during a capture of the executor's stream, on another stream that has been synchronized since.
                memory.owner = memory.writer = self._executor.stream
        matrix, others = arguments[:3], arguments[3:]
        if self._reads_m:
            matrix = (*matrix, arguments[M])
        cached = self._graphs.get(matrix)
        if cached is None:
            while len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            graph, factors = self._make_graph(arguments)
        else:
            graph, factors, before = cached
            if before != others:
                graph.set(*self._outer_launches(arguments))
            if factors is not None:
                factors.prepare(self._addresses(arguments))
        self._graphs[matrix] = graph, factors, others
        graph.launch(self._executor.target)

    def _outer_launches(self, arguments: tuple[Argument, ...]) -> tuple[Launched, Launched]:
        """The kernels before and after the iteration, for the operands of a run."""
        parameters: Any = self._layout.parameters(self._memory.base)
        parameters.values, parameters.lines, parameters.places = (
            arguments[place] or None for place in (VALUES, *self._lines)
        )
        names = ("b", "start", "scale", "out", "info", "iterations", "residual")
        for name, address in zip(names, arguments[3:], strict=True):
            setattr(parameters, name, address or None)
        return self._launch_of(self._begin, parameters), self._launch_of(self._finish, parameters)

    def _launch_of(self, function: int, parameters: SolveParameters) -> Launched:
        return Launched(function, self._layout.blocks, THREADS, parameters)

    def _addresses(self, arguments: tuple[Argument, ...]) -> tuple[Any, ...]:
        """The addresses that the loop body uses."""
        layout = self._layout
        source, target = SOLVED.get(layout.request.op, (Q, Q))
        product = (*arguments[:3], *(layout.vector(self._memory.base, number) for number in (IN, Q)), self._buffer.base)
        return (*product, arguments[M], *(layout.vector(self._memory.base, number) for number in (source, target)))

    def _make_graph(self, arguments: tuple[Argument, ...]) -> tuple[WhileGraph, TriangularSolves | None]:
        base, addresses, factors = self._memory.base, self._addresses(arguments), None
        if self._keeps and not self._graphs:
            self._multiply.set_arguments(addresses)
            self._multiply.invoke("cusparseSpMV_preprocess")
        if None in self._steps:
            spec = self._matrix._replace(values=FACTORS)
            factors = TriangularSolves(self._executor, self._layout.request, spec, SOURCE, OUTPUT, TARGET)
            factors.prepare(addresses)
        parameters = self._layout.parameters(base)
        if self._layout.request.is_blocked:
            parameters.scale = arguments[M] or None
        steps = (factors if step is None else self._launch_of(step, parameters) for step in self._steps)
        repeated = LoopBody(self.row, self._executor, self._multiply, tuple(step for step in steps if step is not None))
        body = self._executor.recorded(repeated, addresses)
        if body is None:
            raise WorkerFailed("the recording of an iteration is invalidated repeatedly by calls of other libraries")
        first, last = self._outer_launches(arguments)
        return WhileGraph(self._executor.device, first, body, last, base), factors


def matrix_spec(request: Any) -> SparseSpec:
    """The description of A, for the addresses of the loop body."""
    form = request.form
    return SparseSpec(
        int(SparseFormat(form.format)),
        form.shape,
        request.values.shape[0],
        form.base,
        form.block,
        request.values.dtype.cuda,
        request.rows.dtype.itemsize,
        request.columns.dtype.itemsize,
        VALUES,
        ROWS,
        COLUMNS,
    )


def spmv_call(request: Any, executor: CudaExecutor, spec: SparseSpec) -> tuple[Call, int]:
    """The call q = A · in over the addresses of the loop body, and the bytes of its workspace."""
    kind, n = request.values.dtype, request.form.shape[0]
    placeholder: int = executor.workspace.c_ptr.value or 0
    plain = cusparse.cusparseOperation_t(0)
    vectors = (DenseVector(n, kind.cuda, place, placeholder) for place in (INPUT, OUTPUT))
    x, y = vectors
    algorithm = cusparse.cusparseSpMVAlg_t(int(request.algorithm))
    matrix = SparseMatrix(spec, placeholder)
    args = (plain, Constant(1.0, kind), matrix, x, Constant(0.0, kind), y, cusparse.cudaDataType(kind.cuda), algorithm)
    size = Call(executor, "cusparseSpMV", args).buffer_size()
    return Call(executor, "cusparseSpMV", (*args, OperandPointer(BUFFER))), size
