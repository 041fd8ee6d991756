"""Convolution and its gradients: `conv_fwd` (bias, residual and activation fused), `conv_bwd_data`, `conv_bwd_filter`.

`ConvFwdRequest` and its two companions are the requests; `cudnn_conv` and `numpy_conv` carry them out, `reference` says
what is right, `cases` what is tested. `conv_transpose` is `conv_bwd_data` as a forward operation. The files: base and
request (what may be asked), graph, cudnn, reference, rules (for the table), cases (what is tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request_function import request_function
from dispatch.ops.conv.request import (
    Activation,
    ConvBwdDataRequest,
    ConvBwdFilterRequest,
    ConvFwdRequest,
    ConvRequest,
)

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

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

Extents = int | tuple[int, ...]


def cudnn_conv(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.conv import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_conv(request: ConvRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in the row's compute type."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.conv.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)


conv_fwd = request_function(ConvFwdRequest, "conv_fwd")
conv_bwd_data = request_function(ConvBwdDataRequest, "conv_bwd_data")
conv_bwd_filter = request_function(ConvBwdFilterRequest, "conv_bwd_filter")


def conv_transpose(
    x: Tensor,
    w: Tensor,
    *,
    extents: tuple[int, ...] | None = None,
    groups: int = 1,
    **choices: Any,
) -> Tensor:
    """The transposed convolution of x (N, C, spatial…) with w (C, K / groups, spatial…): (N, K, spatial…).

    It is `conv_bwd_data` under the name by which networks use it; `extents` are the spatial ones of the result, where a
    stride leaves them open. The other arguments are those of `conv_bwd_data`.
    """
    return conv_bwd_data(x, w, x_extents=extents, group_count=groups, **choices)
