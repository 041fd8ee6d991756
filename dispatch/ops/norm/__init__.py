"""Normalization and its gradient: `norm_fwd` and `norm_bwd`, by layer, root mean square, batch, instance and group.

`NormFwdRequest` and `NormBwdRequest` are the requests; `cudnn_norm` and `numpy_norm` carry them out, `reference` says
what is right, `cases` what is tested. The files: request (what may be asked), graph, group (as several graphs),
cudnn, reference, rules (for the table), cases (what is tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request_function import request_function
from dispatch.ops.norm.request import NormBwdRequest, NormFwdRequest, NormMode, NormRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "NormBwdRequest",
    "NormFwdRequest",
    "NormMode",
    "norm_bwd",
    "norm_fwd",
]


def cudnn_norm(request: NormRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.norm import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_norm(request: NormRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in f32."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.norm.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)


norm_fwd = request_function(NormFwdRequest, "norm_fwd")
norm_bwd = request_function(NormBwdRequest, "norm_bwd")
