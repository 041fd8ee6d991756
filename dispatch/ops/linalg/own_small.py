"""Factorizations and systems of matrices of up to 64 rows by kernels of this library: one launch, whatever the layout.

cuSOLVER and cuBLAS take several calls, with copies between them: of one small matrix, and of many, these are most of
the time.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dispatch.libraries.cusolver.matrix import count_of, matrix_of
from dispatch.libraries.cusolver.spectra import strides_of
from dispatch.libraries.nvrtc.kernel import Kernel, Launch
from dispatch.libraries.nvrtc.small_matrices import Variant, width_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.copies import Strides
    from dispatch.libraries.cusolver.matrix import Matrix

__all__ = ["kernel_of", "plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request, as the rows' rules have it: one launch."""
    return kernel_of(request)(request, executor, row)


def kernel_of(request: Any) -> Kernel:
    """The kernel that carries out a request, with its launch."""
    return _kernel(VARIANTS[request.op](request))


@cache
def _kernel(variant: Variant) -> Kernel:
    return Kernel(variant.source, variant.function, partial(launch_of, variant), variant.options)


def launch_of(variant: Variant, request: Any) -> Launch:
    """One group of threads for each matrix; of operands without elements the status alone is written."""
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
    """The rows of each matrix, 0 where an operand has no element."""
    has_elements = all(request.layout_of(name).size for name in request.reads)
    return ctypes.c_int(request.matrices.shape[-1] if has_elements else 0)


def variant_of(function: str, request: Any) -> Variant:
    """The variant that factorizes."""
    return Variant(function, request.matrices.dtype, width_of(request.matrices.shape[-1]))


# -- Cholesky ---------------------------------------------------------------------------------------------------------
def half(request: Any, name: str) -> Strides:
    """The strides of a matrix of which the lower triangle is meant: the upper one is that of the transposed matrix."""
    found = matrix(request, name)
    return strides_of(found if request.lower else found.mT)


def cholesky_values(request: Any) -> tuple[Any, ...]:
    """U is, transposed, the L of the transposed matrix."""
    return half(request, "a"), half(request, "out"), rows_of(request)


VARIANTS: dict[str, Callable[[Any], Variant]] = {
    "cholesky": partial(variant_of, "cholesky"),
}
VALUES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "cholesky": cholesky_values,
}
