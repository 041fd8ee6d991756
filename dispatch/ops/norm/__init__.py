"""Normalization and its gradient: `norm_fwd` and `norm_bwd`, by layer, root mean square, batch, instance and group.

`NormFwdRequest` and `NormBwdRequest` are the requests; `cudnn_norm` and `numpy_norm` carry them out, `reference` says
what is right, `cases` what is tested. The files: request (what may be asked), graph, group (as several graphs),
cudnn, reference, rules (for the table), cases (what is tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest, NormMode, NormRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "NormBwdRequest",
    "NormFwdRequest",
    "NormMode",
    "cudnn_norm",
    "norm_bwd",
    "norm_fwd",
    "numpy_norm",
]


# fmt: off
def norm_fwd(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, mode: NormMode = NormMode.LAYER_NORM,
    epsilon: float = 1e-5, training: bool = False, momentum: float = 0.1, running_mean: Tensor | None = None,
    running_var: Tensor | None = None, out: Tensor | None = None, mean_out: Tensor | None = None,
    inv_variance_out: Tensor | None = None, running_mean_out: Tensor | None = None,
    running_var_out: Tensor | None = None, workspace: int | None = None, autotune: bool = False, groups: int = 1,
) -> Any:
    """scale · (x - mean) / √(variance + epsilon) + bias on the current stream; returns without waiting.

    LAYER_NORM and RMS_NORM average over the last axes of x, those that scale has; BATCH_NORM and INSTANCE_NORM over
    the spatial axes of x (N, C, spatial…), GROUP_NORM also over the channels of a group, scale being (C,). The
    arguments are the fields of `NormFwdRequest`. Returns Y, or in training (Y, mean, inverse variance, and new running
    statistics where old ones are given); RMS_NORM has no mean. Follows cuDNN's norm forward operation. Raises
    BadRequest for operands that do not fit, NoRow where no library takes the request.
    """
    return run(NormFwdRequest(
        x, scale, bias, running_mean, running_var, out, mean_out, inv_variance_out, running_mean_out, running_var_out,
        mode, epsilon, momentum, training, workspace, autotune, groups,
    ))


def norm_bwd(
    dy: Tensor, x: Tensor, scale: Tensor, inv_variance: Tensor, mean: Tensor | None = None, *,
    mode: NormMode = NormMode.LAYER_NORM, epsilon: float = 1e-5, bias: bool = True, dx: Tensor | None = None,
    dscale: Tensor | None = None, dbias: Tensor | None = None, workspace: int | None = None, autotune: bool = False,
    groups: int = 1,
) -> tuple[Tensor, ...]:
    """(dX, dscale, dbias) of `norm_fwd`, from dY and the statistics that it gave back in training.

    The arguments are the fields of `NormBwdRequest`. Raises as `norm_fwd` does.
    """
    result: tuple[Tensor, ...] = run(NormBwdRequest(
        dy, x, scale, inv_variance, mean, dx, dscale, dbias, mode, epsilon, bias, workspace, autotune, groups,
    ))
    return result
# fmt: on


def cudnn_norm(request: NormRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.norm import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_norm(request: NormRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in f32."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.norm.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)
