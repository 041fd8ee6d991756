"""Incomplete factors within an iteration: two triangular solves by cuSPARSE, analysed before the graph is recorded.

The factors have the pattern of A, so they share A's offsets and indices. An analysis lives as long as the graph whose
loop body uses it. Values are passed to it before each launch, because they may have changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cusparse
from dispatch.core.matrix_choices import DiagType, FillMode, Operation
from dispatch.libraries.cublas.calls import Constant
from dispatch.libraries.cusparse.analyses import Solve
from dispatch.libraries.cusparse.descriptors import DenseVector, SparseMatrix
from dispatch.ops.sparse.krylov import Preconditioner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusparse.descriptors import SparseSpec

__all__ = ["TriangularSolves"]

LOWER, UPPER = (int(member) for member in (FillMode.LOWER, FillMode.UPPER))
UNIT, NON_UNIT = (int(member) for member in (DiagType.UNIT, DiagType.NON_UNIT))
# The triangle, the diagonal and the operation of each solve, in order.
TRIANGLES = {
    Preconditioner.ILU0: ((LOWER, UNIT, Operation.N), (UPPER, NON_UNIT, Operation.N)),
    Preconditioner.IC0: ((LOWER, NON_UNIT, Operation.N), (LOWER, NON_UNIT, Operation.C)),
}


class TriangularSolves:
    """The two solves of one graph: from the vector at the place `source`, through `intermediate`, to `target`."""

    __slots__ = ("_solves",)

    def __init__(
        self, executor: CudaExecutor, request: Any, factors: SparseSpec, source: int, intermediate: int, target: int
    ) -> None:
        """`factors` describes A with the values of the factors."""
        placeholder: int = executor.workspace.c_ptr.value or 0
        kind, n = request.values.dtype, factors.shape[0]
        number = cusparse.cudaDataType(kind.cuda)
        algorithm = cusparse.cusparseSpSVAlg_t(0)

        def solve(fill: int, diag: int, operation: Operation, place: int, into: int) -> Solve:
            matrix = SparseMatrix(factors._replace(fill=fill, diag=diag), placeholder)
            x, y = (DenseVector(n, kind.cuda, where, placeholder) for where in (place, into))
            # cuSPARSE has no adjoint of real matrices, only the transpose.
            applied = operation if kind.is_complex or operation is not Operation.C else Operation.T
            turned = cusparse.cusparseOperation_t(int(applied))
            arguments = (turned, Constant(1.0, kind), matrix, x, y, number, algorithm)
            return Solve(executor, "cusparseSpSV", matrix, arguments, factors.values, keeps=True)

        first, second = TRIANGLES[request.preconditioner]
        self._solves = solve(*first, source, intermediate), solve(*second, intermediate, target)

    def prepare(self, addresses: Sequence[Any]) -> None:
        """Analyse both triangles, or pass their present values."""
        for solve in self._solves:
            solve.prepare(addresses)

    def enqueue(self) -> None:
        """Enqueue both solves, at the addresses for which `prepare` was called."""
        for solve in self._solves:
            solve.solve()
