"""Factorizations and systems of matrices of up to 64 rows by kernels of this library: one launch, for any layout.

cuSOLVER and cuBLAS need several calls, with copies between them, which take most of the time for one small matrix and
for many.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dispatch.libraries.cusolver.matrix import count_of, matrix_of
from dispatch.libraries.nvrtc.kernel import Kernel, Launch
from dispatch.libraries.nvrtc.launching import Strides
from dispatch.libraries.nvrtc.small_kernels import Variant, columns_of, width_of
from dispatch.ops.linalg.request import MatrixKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix

__all__ = ["kernel_of", "plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request that the rows' rules allow: one launch."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: Any) -> Kernel:
    """The kernel for a request, with its launch."""
    return _kernel(VARIANTS[request.op](request))


@cache
def _kernel(variant: Variant) -> Kernel:
    return Kernel(variant.source, variant.function, partial(launch_of, variant), variant.options)


def launch_of(variant: Variant, request: Any) -> Launch:
    """One group of threads for each matrix; for operands without elements only the status is written."""
    batch = count_of(request.batch)
    values = VALUES[request.op](request)
    return Launch(
        grid=(-(-batch // variant.matrices),),
        block=(variant.threads,),
        values=(ctypes.c_int64(batch), *values),
        shared=variant.shared,
    )


def matrix(request: Any, name: str) -> Matrix:
    """An operand as a matrix; a vector is one column."""
    layout = request.layout_of(name)
    return matrix_of(layout, request.place_of(name), vector=len(layout.shape) == 1)


def rows_of(request: Any) -> ctypes.c_int:
    """The number of rows of each matrix, 0 if an operand has no element."""
    has_elements = all(request.layout_of(name).size for name in request.reads)
    return ctypes.c_int(request.matrices.shape[-1] if has_elements else 0)


def factor_variant(function: str, request: Any) -> Variant:
    """The variant of a kernel that factorizes."""
    return Variant(function, request.matrices.dtype, width_of(request.matrices.shape[-1]))


def system_variant(function: str, request: Any) -> Variant:
    """The variant of a kernel that solves for right-hand sides."""
    return factor_variant(function, request)._replace(columns=columns_of(sides_of(request)))


def sides_of(request: Any) -> int:
    """The number of right-hand sides; for an inverse the columns of the identity."""
    sides: int = request.matrices.shape[-1] if request.op == "inv" else matrix(request, "b").cols
    return sides


# -- factors ----------------------------------------------------------------------------------------------------------
def half(request: Any, name: str) -> Strides:
    """The strides of a matrix whose lower triangle is read; an upper one is that of the transposed matrix."""
    a = matrix(request, name)
    return Strides.of(a if request.lower else a.mT)


def cholesky_values(request: Any) -> tuple[Any, ...]:
    """The arguments of Cholesky; U is the transpose of the L of the transposed matrix."""
    return half(request, "a"), half(request, "out"), rows_of(request)


def general_values(request: Any) -> tuple[Any, ...]:
    """The arguments of a kernel with one input and one output matrix."""
    return Strides.of(matrix(request, "a")), Strides.of(matrix(request, "out")), rows_of(request)


# -- systems ----------------------------------------------------------------------------------------------------------
def system_values(request: Any, of: Strides) -> tuple[Any, ...]:
    """The arguments of a kernel with a matrix and right-hand sides."""
    b, out = matrix(request, "b"), matrix(request, "out")
    return of, Strides.of(b), Strides.of(out), rows_of(request), ctypes.c_int(b.cols)


def positive_values(request: Any, name: str = "a") -> tuple[Any, ...]:
    """The arguments of a positive definite system; an upper triangle, transposed, is the conjugate of the lower one."""
    return *system_values(request, half(request, name)), ctypes.c_int(not request.lower)


def is_positive(request: Any) -> bool:
    """Whether the matrix of a system is positive definite."""
    return request.assume_a is MatrixKind.POS


def solve_variant(request: Any) -> Variant:
    """The variant of the LU or of the Cholesky kernel."""
    return system_variant("solve_positive" if is_positive(request) else "solve", request)


def solve_values(request: Any) -> tuple[Any, ...]:
    """The arguments of the LU or of the Cholesky kernel."""
    if is_positive(request):
        return positive_values(request)
    return system_values(request, Strides.of(matrix(request, "a")))


def lu_solve_values(request: Any) -> tuple[Any, ...]:
    """The arguments, followed by the choice of the matrix, its transpose or its conjugate transpose."""
    return *system_values(request, Strides.of(matrix(request, "lu"))), ctypes.c_int(request.trans)


VARIANTS: dict[str, Callable[[Any], Variant]] = {
    "cholesky": partial(factor_variant, "cholesky"),
    "lu_factor": partial(factor_variant, "lu_factor"),
    "solve": solve_variant,
    "inv": partial(system_variant, "inverse"),
    "cho_solve": partial(system_variant, "cho_solve"),
    "lu_solve": partial(system_variant, "lu_solve"),
}
VALUES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "cholesky": cholesky_values,
    "lu_factor": general_values,
    "solve": solve_values,
    "inv": general_values,
    "cho_solve": partial(positive_values, name="c"),
    "lu_solve": lu_solve_values,
}
