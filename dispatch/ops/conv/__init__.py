"""Convolution and its gradients: `conv_fwd` (bias, residual and activation fused), `conv_bwd_data`, `conv_bwd_filter`.

`ConvFwdRequest`, `ConvBwdDataRequest` and `ConvBwdFilterRequest` are the requests. `cudnn_conv`, `cutlass_conv`,
`multistage_conv` and the host's `numpy_conv` and `numpy_tree_conv` make their plans, `reference` computes the expected
results, `cases` has the test cases. `conv_transpose` is `conv_bwd_data` as a forward operation. The files: base, trees
and request (fields and checks), rules (for the table), reference; graph and cudnn; problem, config, cutlass, sm80 and
precompile (for CUTLASS); cases, tree_cases and forms (test cases), mutations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from dispatch.checks import names_arguments
from dispatch.core.host_plan import numpy_call
from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.errors import BadRequest
from dispatch.ops.conv.reference import evaluate
from dispatch.ops.conv.request import Activation, ConvRequest
from dispatch.unknown_arguments import refuse_arguments, signature_of

if TYPE_CHECKING:
    from inspect import Signature

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.ops.conv.results import (
        ConvBwdDataRequest,
        ConvBwdFilterRequest,
        ConvFwdRequest,
        conv_bwd_data,
        conv_bwd_filter,
        conv_fwd,
    )
else:
    from dispatch.ops.conv.request import ConvBwdDataRequest, ConvBwdFilterRequest, ConvFwdRequest

    conv_fwd = request_function(ConvFwdRequest, "conv_fwd")
    conv_bwd_data = request_function(ConvBwdDataRequest, "conv_bwd_data")
    conv_bwd_filter = request_function(ConvBwdFilterRequest, "conv_bwd_filter")

__all__ = [
    "Activation",
    "ConvBwdDataRequest",
    "ConvBwdFilterRequest",
    "ConvFwdRequest",
    "conv_bwd_data",
    "conv_bwd_filter",
    "conv_fwd",
    "conv_transpose",
]

cudnn_conv = plan_call(
    "cudnn_conv",
    "dispatch.ops.conv.cudnn",
    "A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph.",
)
numpy_conv = numpy_call(evaluate)


def cutlass_conv(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that launches a CUTLASS kernel with im2col tensor maps, which is compiled unless it is cached."""
    from dispatch.libraries.cutlass.compile import plan_of  # at first use: importing `dispatch` looks for no headers
    from dispatch.ops.conv import cutlass

    return plan_of(cutlass.plan, request, executor, row)


def multistage_conv(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that launches a multistage CUTLASS kernel, which every GPU from sm_80 on runs."""
    from dispatch.libraries.cutlass.compile import plan_of
    from dispatch.ops.conv import sm80

    return plan_of(sm80.plan, request, executor, row)


def numpy_tree_conv(_request: ConvRequest, _executor: Executor, row: Row) -> Plan:
    """A plan that computes the same as CUTLASS's kernels with NumPy."""
    from dispatch.ops.conv.reference import NumpyTreePlan

    return NumpyTreePlan(row, capture_safe=False)


# The names of conv_bwd_data's arguments in conv_transpose.
TRANSPOSE_NAMES = {"dy": "x", "x_extents": "extents", "group_count": "groups"}


def channels_last(tensor: Tensor) -> Tensor:
    """A dense copy of an image or a filter (N, C, spatial…) with channels last; copies through the host, and waits."""
    from dispatch.core.layouts import dense_strides

    device = tensor.device
    memory = device.empty(tuple(tensor.shape[axis] for axis in (0, *range(2, tensor.ndim), 1)), tensor.dtype)
    layout = device.layout(tensor.dtype, tensor.shape, dense_strides(tensor.shape, last=True), memory.ptr)
    view = type(tensor)(memory.storage, memory.ptr, layout)
    view.copy_from(tensor.numpy())
    return view


@overload
def conv_transpose(
    x: Tensor,
    w: Tensor,
    *,
    extents: tuple[int, ...] | None = None,
    groups: int | None = None,
    epilogue: None = None,
    **choices: Any,
) -> Tensor: ...
@overload
def conv_transpose(
    x: Tensor,
    w: Tensor,
    *,
    extents: tuple[int, ...] | None = None,
    groups: int | None = None,
    epilogue: Node,
    **choices: Any,
) -> Tensor | tuple[Tensor, ...]: ...
@names_arguments
def conv_transpose(
    x: Tensor,
    w: Tensor,
    *,
    extents: tuple[int, ...] | None = None,
    groups: int | None = None,
    **choices: Any,
) -> Tensor | tuple[Tensor, ...]:
    """The transposed convolution of x (N, C, spatial…) with w (C, K / groups, spatial…): (N, K, spatial…).

    This is `conv_bwd_data` under the name that networks use.

    Args:
        x: (N, C, spatial…), the dy of `conv_bwd_data`.
        w: (C, K / groups, spatial…).
        extents: the spatial extents of the result if the stride leaves them open; None takes the smallest.
        groups: the number of groups, which does not follow from x and w. None takes the one of `out`, 1 if it is left
            out.

    The other arguments are those of `conv_bwd_data`, documented in help(dispatch.conv_bwd_data). The messages of NoRow
    name that op, whose dy is x.
    """
    if not choices.keys() <= CHOICES:
        refuse_arguments("conv_transpose", conv_transpose, (), choices)
    try:
        result: Tensor | tuple[Tensor, ...] = conv_bwd_data(x, w, x_extents=extents, group_count=groups, **choices)
    except BadRequest as error:
        raise error.renamed(TRANSPOSE_NAMES) from None
    return result


def _signature() -> Signature:
    """The signature of conv_bwd_data under the names of conv_transpose."""
    signature = signature_of(conv_bwd_data)
    named = [one.replace(name=TRANSPOSE_NAMES.get(one.name, one.name)) for one in signature.parameters.values()]
    first_names = ["x", "w", "extents", "groups"]
    ordered = sorted(
        named, key=lambda one: first_names.index(one.name) if one.name in first_names else len(first_names)
    )
    return signature.replace(parameters=ordered)


SIGNATURE = _signature()
conv_transpose.__signature__ = SIGNATURE  # type: ignore[attr-defined]  # of which `inspect` and `help` know
CHOICES = frozenset(SIGNATURE.parameters)
