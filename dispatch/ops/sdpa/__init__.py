"""Scaled dot product attention and its gradient: `sdpa_fwd` and `sdpa_bwd`, fused by cuDNN.

`SdpaFwdRequest` and `SdpaBwdRequest` are the requests; `cudnn_sdpa` and `numpy_sdpa` carry them out, `reference` says
what is right, `cases` what is tested. The files: base and request (what may be asked), packed (sequences without
padding), graph, cudnn, reference, rules (for the table), cases (what is tested).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.request_function import request_function
from dispatch.ops.sdpa.packed import ragged_offsets
from dispatch.ops.sdpa.request import Diagonal, SdpaBwdRequest, SdpaFwdRequest, SdpaRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.execute.executor import Executor

__all__ = [
    "Diagonal",
    "SdpaBwdRequest",
    "SdpaFwdRequest",
    "ragged_offsets",
    "sdpa_bwd",
    "sdpa_fwd",
]


def cudnn_sdpa(request: SdpaRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph."""
    from dispatch.ops.sdpa import cudnn  # at first use: importing `dispatch` binds no library

    return cudnn.plan(request, executor, row)


def numpy_sdpa(request: SdpaRequest, executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy in f32."""
    from dispatch.core.host_plan import numpy_plan
    from dispatch.ops.sdpa.reference import evaluate

    return numpy_plan(evaluate, request, executor, row)


sdpa_fwd = request_function(SdpaFwdRequest, "sdpa_fwd")
sdpa_bwd = request_function(SdpaBwdRequest, "sdpa_bwd")
