"""Convolution and its gradients by CUTLASS kernels with epilogue trees, dense with channels last.

`cutlass_conv_fwd`, `cutlass_conv_bwd_data`, `cutlass_conv_bwd_filter` are the request functions; `cutlass_plan`,
`multistage_plan` and `numpy_plan` carry the requests out, reference.py says what is right. The files: base,
request (what may be asked), problem, rules (for the table), cutlass and sm80 (on a GPU), precompile, reference, cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.cutlass_conv.request import (
    CutlassConvBwdDataRequest,
    CutlassConvBwdFilterRequest,
    CutlassConvFwdRequest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor
    from dispatch.keys import Compute
    from dispatch.libraries.cutlass.config import Config
    from dispatch.libraries.cutlass.evt import Node
    from dispatch.ops.conv.base import Padding
    from dispatch.ops.cutlass_conv.base import TreedConvRequest

__all__ = [
    "CutlassConvBwdDataRequest",
    "CutlassConvBwdFilterRequest",
    "CutlassConvFwdRequest",
    "cutlass_conv_bwd_data",
    "cutlass_conv_bwd_filter",
    "cutlass_conv_fwd",
]

Extents = int | tuple[int, ...]


# fmt: off
def cutlass_conv_fwd(
    x: Tensor, w: Tensor, *, c: Tensor | None = None, out: Tensor | None = None, epilogue: Node | None = None,
    operands: Mapping[str, Tensor | float] | None = None, pad: Padding = 0, stride: Extents = 1, dilation: Extents = 1,
    alpha: float = 1.0, beta: float | None = None, compute: Compute | None = None, out_dtype: Any = None,
    config: Config | None = None,
) -> Any:
    """Y = tree(conv(x, w), c, operands), on the current stream; returns without waiting.

    x is (N, C, spatial…) with 1 to 3 spatial axes, w (K, C / groups, spatial…), Y (N, K, spatial…), all of them dense
    with channels last in memory (`channels_last` copies a tensor so). The arguments are the fields of
    `CutlassConvFwdRequest`, which documents them. Returns Y, or Y and the tree's other outputs in its order. The first
    call for a kernel compiles it (later ones load it from disk). Raises BadRequest for operands that do not fit, NoRow
    where no kernel takes the request, CompileFailed where NVRTC refuses one.
    """
    return run(CutlassConvFwdRequest(
        x, w, c, out, epilogue, operands, pad, stride, dilation, alpha, beta, compute, out_dtype, config,
    ))


def cutlass_conv_bwd_data(
    dy: Tensor, w: Tensor, *, c: Tensor | None = None, out: Tensor | None = None, epilogue: Node | None = None,
    operands: Mapping[str, Tensor | float] | None = None, x_extents: tuple[int, ...] | None = None,
    group_count: int = 1, pad: Padding = 0, stride: Extents = 1, dilation: Extents = 1, alpha: float = 1.0,
    beta: float | None = None, compute: Compute | None = None, out_dtype: Any = None, config: Config | None = None,
) -> Any:
    """The gradient of the convolution by x: DX (N, C, spatial…) from dy (N, K, spatial…) and w (K, C, spatial…).

    The arguments are the fields of `CutlassConvBwdDataRequest`. Raises as `cutlass_conv_fwd` does.
    """
    return run(CutlassConvBwdDataRequest(
        dy, w, out=out, x_extents=x_extents, group_count=group_count, pad=pad, stride=stride, dilation=dilation,
        alpha=alpha, beta=beta, compute=compute, out_dtype=out_dtype, c=c, epilogue=epilogue, operands=operands,
        config=config,
    ))


def cutlass_conv_bwd_filter(
    dy: Tensor, x: Tensor, *, c: Tensor | None = None, out: Tensor | None = None,
    w_extents: tuple[int, ...] | None = None, group_count: int = 1, pad: Padding = 0, stride: Extents = 1,
    dilation: Extents = 1, alpha: float = 1.0, beta: float | None = None, compute: Compute | None = None,
    out_dtype: Any = None, config: Config | None = None,
) -> Any:
    """The gradient of the convolution by w: DW (K, C, spatial…) from dy (N, K, spatial…) and x (N, C, spatial…).

    The arguments are the fields of `CutlassConvBwdFilterRequest`. Raises as `cutlass_conv_fwd` does.
    """
    return run(CutlassConvBwdFilterRequest(
        dy, x, out=out, w_extents=w_extents, group_count=group_count, pad=pad, stride=stride, dilation=dilation,
        alpha=alpha, beta=beta, compute=compute, out_dtype=out_dtype, c=c, config=config,
    ))
# fmt: on


def channels_last(tensor: Tensor) -> Tensor:
    """A copy of an image or a filter (N, C, spatial…) that is dense with channels last; by way of the host, waiting."""
    from dispatch.core.layouts import dense_strides

    device = tensor.device
    made = device.empty(tuple(tensor.shape[axis] for axis in (0, *range(2, tensor.ndim), 1)), tensor.dtype)
    layout = device.layout(tensor.dtype, tensor.shape, dense_strides(tensor.shape, last=True), made.ptr)
    view = type(tensor)(made.storage, made.ptr, layout)
    view.copy_from(tensor.numpy())
    return view


def cutlass_plan(request: TreedConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a CUTLASS kernel with im2col tensor maps, which is compiled where it is in no cache."""
    from dispatch.ops.cutlass_conv import cutlass  # at first use: importing `dispatch` looks for no headers

    return cutlass.plan(request, executor, row)


def multistage_plan(request: TreedConvRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a multistage kernel, which every GPU since sm_80 runs."""
    from dispatch.ops.cutlass_conv import sm80 as multistage

    return multistage.plan(request, executor, row)


def numpy_plan(_request: TreedConvRequest, _executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.ops.cutlass_conv import reference as host

    return host.plan(row)
