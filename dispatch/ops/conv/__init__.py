"""Convolution and its gradients: `conv_fwd` (bias, residual and activation fused), `conv_bwd_data`, `conv_bwd_filter`.

`ConvFwdRequest` and its two companions are the requests; `cudnn_conv` and `numpy_conv` carry them out, `reference` says
what is right, `cases` what is tested. `conv_transpose` is `conv_bwd_data` as a forward operation. The files: base and
request (what may be asked), graph, cudnn, reference, rules (for the table), cases (what is tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.conv.request import (
    Activation,
    ConvBwdDataRequest,
    ConvBwdFilterRequest,
    ConvFwdRequest,
    ConvRequest,
    Padding,
)

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.keys import Compute

__all__ = [
    "Activation",
    "ConvBwdDataRequest",
    "ConvBwdFilterRequest",
    "ConvFwdRequest",
    "Padding",
    "conv_bwd_data",
    "conv_bwd_filter",
    "conv_fwd",
    "conv_transpose",
    "cudnn_conv",
    "numpy_conv",
]

Extents = int | tuple[int, ...]


# fmt: off
def conv_fwd(
    x: Tensor, w: Tensor, *, bias: Tensor | None = None, z: Tensor | None = None, out: Tensor | None = None,
    pad: Padding = 0, stride: Extents = 1, dilation: Extents = 1, activation: Activation = Activation.IDENTITY,
    alpha: float = 1.0, beta: float | None = None, compute: Compute | None = None, out_dtype: Any = None,
    deterministic: bool = False, workspace: int | None = None, autotune: bool = False,
) -> Tensor:
    """Y = activation(alpha · conv(x, w) + beta · z + bias), on the current stream; returns without waiting.

    x is (N, C, spatial…) with 1 to 3 spatial axes, w (K, C / groups, spatial…), bias (K,), z and Y (N, K, spatial…);
    the arguments are the fields of `ConvFwdRequest`, which documents them. Follows cuDNN's convolution forward
    operation. Raises BadRequest for operands that do not fit, NoRow where no library takes the request.
    """
    result: Tensor = run(ConvFwdRequest(
        x, w, bias, z, out, pad, stride, dilation, activation, alpha, beta, compute, out_dtype, deterministic,
        workspace, autotune,
    ))
    return result


def conv_bwd_data(
    dy: Tensor, w: Tensor, *, out: Tensor | None = None, x_extents: tuple[int, ...] | None = None,
    group_count: int = 1, pad: Padding = 0, stride: Extents = 1, dilation: Extents = 1, alpha: float = 1.0,
    beta: float = 0.0, compute: Compute | None = None, out_dtype: Any = None, deterministic: bool = False,
    workspace: int | None = None, autotune: bool = False,
) -> Tensor:
    """The gradient of `conv_fwd` by x: DX (N, C, spatial…) from dy (N, K, spatial…) and w (K, C / groups, spatial…).

    The arguments are the fields of `ConvBwdDataRequest`. Raises as `conv_fwd` does.
    """
    result: Tensor = run(ConvBwdDataRequest(
        dy, w, out, x_extents, group_count, pad, stride, dilation, alpha, beta, compute, out_dtype, deterministic,
        workspace, autotune,
    ))
    return result


def conv_bwd_filter(
    dy: Tensor, x: Tensor, *, out: Tensor | None = None, w_extents: tuple[int, ...] | None = None,
    group_count: int = 1, pad: Padding = 0, stride: Extents = 1, dilation: Extents = 1, alpha: float = 1.0,
    beta: float = 0.0, compute: Compute | None = None, out_dtype: Any = None, deterministic: bool = False,
    workspace: int | None = None, autotune: bool = False,
) -> Tensor:
    """The gradient of `conv_fwd` by w: DW (K, C / groups, spatial…) from dy (N, K, spatial…) and x (N, C, spatial…).

    The arguments are the fields of `ConvBwdFilterRequest`. Raises as `conv_fwd` does.
    """
    result: Tensor = run(ConvBwdFilterRequest(
        dy, x, out, w_extents, group_count, pad, stride, dilation, alpha, beta, compute, out_dtype, deterministic,
        workspace, autotune,
    ))
    return result


def conv_transpose(
    x: Tensor, w: Tensor, *, out: Tensor | None = None, extents: tuple[int, ...] | None = None, groups: int = 1,
    pad: Padding = 0, stride: Extents = 1, dilation: Extents = 1, compute: Compute | None = None,
    autotune: bool = False,
) -> Tensor:
    """The transposed convolution of x (N, C, spatial…) with w (C, K / groups, spatial…): (N, K, spatial…).

    It is `conv_bwd_data` under the name by which networks use it; `extents` are the spatial ones of the result, where a
    stride leaves them open.
    """
    return conv_bwd_data(
        x, w, out=out, x_extents=extents, group_count=groups, pad=pad, stride=stride, dilation=dilation,
        compute=compute, autotune=autotune,
    )
# fmt: on


def cudnn_conv(request: ConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.conv import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_conv(request: ConvRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in the row's compute type."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.conv.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
