"""Plans of products with a caller's operators, which are compiled into our kernels: one launch each.

The partial sums that blocks exchange, and counters that are 0 between launches, are memory of the plan, as in
own_product.py and own_matrix.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.errors import NvrtcError
from dispatch.keys import F32
from dispatch.libraries.cusparse.calls import IdlePlan
from dispatch.libraries.cusparse.operator_source import KERNEL_OPTIONS, row_epilogue_namespace
from dispatch.ops.sparse import product_kernels
from dispatch.ops.sparse.caller_operators import compile_error, operators_of
from dispatch.ops.sparse.own_matrix import COMPUTE, DenseOperand, launch
from dispatch.ops.sparse.own_product import product

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["plan"]


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request; BadRequest, with the line, for operators that do not compile."""
    if not request.layout_of("out").size:
        return IdlePlan(row, capture_safe=False)
    try:
        if request.op == "spmm_op":
            return multiply_over_semiring(request, executor, row)
        return product(request, executor, row, lambda chosen: epilogue_kernel(request, chosen))
    except NvrtcError as error:
        raise compile_error(request, error) from error


def epilogue_kernel(request: Any, chosen: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    """The kernel of a product with a vector, with an epilogue in it.

    Macros that are options of NVRTC elsewhere are defined after the caller's lines here, so that these cannot see names
    of the kernel.
    """
    if request.epilogue is None:
        return product_kernels.SOURCE, product_kernels.NAME, chosen
    words = (option.removeprefix("-D").replace("=", " ", 1) for option in chosen if option.startswith("-D"))
    defined = "".join(f"#define {word}\n" for word in (*words, "FINISHED operators::of_row"))
    lines = row_epilogue_namespace(COMPUTE.get(request.values.dtype, F32), request.epilogue.code)
    return lines + defined + product_kernels.SOURCE, product_kernels.NAME, KERNEL_OPTIONS


def multiply_over_semiring(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """One launch, of so many blocks for each part of B's columns."""
    operators = operators_of(request, COMPUTE.get(request.values.dtype, F32)).as_namespace()
    right = DenseOperand(request.layout_of("b"), request.place_of("b"))
    return launch(request, executor, operators, right).plan(executor, row)
