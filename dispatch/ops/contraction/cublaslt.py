"""Contractions that are matrix products, by `cublasLtMatmul`, without copies of the operands.

cuBLASLt's matrices are column-major: it sees a product with dense rows as its transpose, so B comes first.
"""

from __future__ import annotations

import ctypes
from math import gcd
from typing import TYPE_CHECKING, Any

from cudabind.sys import cublasLt as lt
from dispatch.core.request import Argument, IdlePlan, Plan
from dispatch.errors import Refused
from dispatch.keys import C64, C128, F32, F64, Dtype, Epilogue
from dispatch.libraries.cublas.scalars import HostNumber
from dispatch.libraries.cublaslt.descriptors import Descriptors, heuristic
from dispatch.libraries.cublaslt.handle import handle_of
from dispatch.libraries.cublaslt.problem import Matrix, Problem
from dispatch.ops.contraction.product import product_of

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.contraction.product import Matrix as Operand
    from dispatch.ops.contraction.product import Product

__all__ = ["ProductPlan", "plan", "problem_of"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a contraction; Refused where cuBLASLt has no algorithm for the product."""
    if not request.layout_of("out").size:
        return IdlePlan(row)
    product = product_of(request)
    if isinstance(product, str):
        raise Refused(product)
    return ProductPlan(request, executor, row, product)


def scalar_of(dtype: Dtype) -> Dtype:
    """The dtype of alpha and beta, which is that of the sums."""
    return dtype if dtype in (F64, C64, C128) else F32


def column_major(request: Any, operand: Operand, call_offset: int = 0) -> tuple[Matrix, bool]:
    """The transpose of an operand as a column-major matrix; or the operand itself, and True: it is to be transposed.

    `call_offset` is the offset in elements between the operands of consecutive calls.
    """
    layout = request.layout_of(operand.name)
    *batch, rows, columns = operand.shape
    *batch_steps, row_step, column_step = operand.strides
    stride = batch_steps[0] if batch else 0
    alignment = gcd(layout.alignment, stride * layout.dtype.itemsize, call_offset * layout.dtype.itemsize)
    if operand.has_dense_rows:
        step = row_step if rows > 1 else columns
        return Matrix(layout.dtype.cuda, columns, rows, max(step, columns), stride, alignment), False
    step = column_step if columns > 1 else rows
    return Matrix(layout.dtype.cuda, rows, columns, max(step, rows), stride, alignment), True


def problem_of(request: Any, row: Row, product: Product) -> Problem:
    """The product in cuBLASLt's terms."""

    def lowered(one: Operand) -> tuple[Matrix, bool]:
        return column_major(request, one, product.call_offsets.get(one.name, 0))

    (b, op_b), (a, op_a), (d, _) = map(lowered, (product.a, product.b, product.out))
    c = d if product.c is None else lowered(product.c)[0]
    batch = product.out.shape[0] if len(product.out.shape) > 2 else 1
    scale = scalar_of(request.result_dtype).cuda
    compute: Any = row.compute
    return Problem(a, b, c, d, op_a, op_b, batch, int(compute), scale, Epilogue.NONE, adds_c=product.c is not None)


class ProductPlan(Plan):
    """One `cublasLtMatmul` that is prepared except for the addresses and the numbers."""

    __slots__ = ("_algo", "_call_offsets", "_calls", "_descriptors", "_executor", "_numbers", "_places", "_workspace")

    def __init__(self, request: Any, executor: CudaExecutor, row: Row, product: Product) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        problem = problem_of(request, row, product)
        self._descriptors = Descriptors(problem)
        limit = executor.workspace.nbytes
        if request.workspace is not None:
            limit = min(limit, request.workspace)
        (best,) = heuristic(handle_of(executor), self._descriptors, problem, limit)
        self._algo, self._workspace = best.algo, ctypes.c_size_t(best.workspaceSize)
        scalar = scalar_of(request.result_dtype)
        self._numbers = HostNumber(scalar), HostNumber(scalar)
        added = product.out if product.c is None else product.c
        operands = (product.b, product.a, added, product.out)
        self._places = [request.place_of(one.name) for one in operands]
        self._calls = product.calls
        self._call_offsets = [
            product.call_offsets.get(one.name, 0) * request.layout_of(one.name).dtype.itemsize for one in operands
        ]

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuBLASLt on the executor's stream; raises its own error."""
        alpha, beta = self._numbers
        alpha.set(arguments[-2])
        beta.set(arguments[-1])
        for number in range(self._calls):
            self._call(
                *(
                    int(arguments[k].real) + number * step
                    for k, step in zip(self._places, self._call_offsets, strict=True)
                )
            )

    def _call(self, *addresses: int) -> None:
        a, b, c, d = map(ctypes.c_void_p, addresses)
        alpha, beta = self._numbers
        executor, layouts = self._executor, self._descriptors.layouts
        status = lt.cublasLtMatmul.unchecked(
            *(handle_of(executor), self._descriptors.matmul, alpha.address),
            *(a, layouts["a"], b, layouts["b"], beta.address, c, layouts["c"], d, layouts["d"]),
            *(ctypes.byref(self._algo), executor.workspace.c_ptr, self._workspace, executor.target.value),
        )
        if status:
            executor.stream.done()  # raises DeviceFault if the device is lost
            raise lt.cublasLtMatmul.error(status)
