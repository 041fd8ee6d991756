"""An attention request carried out by cuDNN's backend: as one unified operation, or as the composed graph.

The table's GPU rows end here, by `plan`. Every version takes the composed graph; the unified operation is tried first
where the installed cuDNN has it and the request has nothing that it lacks.
"""

from __future__ import annotations

import math
from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from cudabind.sys import cudnn
from dispatch.errors import Refused
from dispatch.keys import I64, Arch
from dispatch.libraries.cudnn.engines import Policy
from dispatch.libraries.cudnn.plan import WORKSPACE, bind
from dispatch.libraries.cudnn.prefill import Clear, Fill, with_prefill, zero_fills
from dispatch.ops.sdpa.graph import composed_graph, unified_graph
from dispatch.ops.sdpa.request import SdpaBwdRequest, SdpaFwdRequest

if TYPE_CHECKING:
    from dispatch.core.request import Plan
    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sdpa.request import SdpaRequest

__all__ = ["plan", "policy_of"]

OFFSETS_FROM = Arch(90)  # engines take sequences by offsets from here on
UNIFIED = 91300  # the first cuDNN with CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR


def policy_of(request: SdpaRequest, row: Row) -> Policy:
    """Sums are in f32; only a gradient may depend on the order of its sums, where it is allowed to."""
    del row
    deterministic = isinstance(request, SdpaBwdRequest) and request.deterministic
    return Policy(True, deterministic, WORKSPACE * 4 if request.workspace is None else request.workspace)


def plan(request: SdpaRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor; Refused with cuDNN's words where no engine takes it."""
    policy, tune = policy_of(request, row), request.autotune
    if isinstance(request, SdpaFwdRequest) and request.alone and cudnn.cudnnGetVersion() >= UNIFIED:
        with suppress(Refused):
            graph, places, _ = unified_graph(request)
            return bind(request, executor, row, graph, places, policy, autotune=tune)
    fills: tuple[Fill, ...] = ()
    if isinstance(request, SdpaFwdRequest) and request.mask:
        # Engines pass over blocks that no query sees, and write no mask there (9.19).
        fills = (Fill(request.place_of("mask_out"), 0.0, prod(request.scores)),)
    # Of one query the engine looks at no more keys than there are, and takes a third longer where it has offsets.
    decodes = isinstance(request, SdpaFwdRequest) and request.scores[2] == 1
    if (
        request.padded
        and request.pages is None
        and not (request.packed or decodes)
        and executor.device.arch >= OFFSETS_FROM
    ):
        with suppress(Refused):
            return _plan_by_offsets(request, executor, row, policy, fills)
    graph, places, _ = composed_graph(request)
    made = bind(request, executor, row, graph, places, policy, autotune=tune)
    return with_prefill(executor, made, fills, _clears(request))


def _plan_by_offsets(
    request: SdpaRequest, executor: CudaExecutor, row: Row, policy: Policy, fills: tuple[Fill, ...]
) -> Plan:
    """The plan of padded sequences, which engines take one by one and write nothing behind the end of."""
    graph, places, strides = composed_graph(request, by_offsets=True)
    number = np.arange(request.scores[0] + 1, dtype=np.int64)
    extra = tuple(_i64_tensor(executor, number * stride) for stride in strides)
    made = bind(request, executor, row, graph, places, policy, autotune=request.autotune, extra=extra)
    if isinstance(request, SdpaFwdRequest) and request.stats:
        fills += (Fill(request.place_of("stats_out"), -math.inf, prod(request.scores[:3])),)
    return with_prefill(executor, made, fills, _clears(request))


def _i64_tensor(executor: CudaExecutor, numbers: np.ndarray[Any, Any]) -> Tensor:
    """These i64 on the executor's own stream, which need not be the calling thread's current one."""
    made = executor.empty(numbers.shape, (1,), I64)
    with executor.device.context:
        driver.cuMemcpyHtoDAsync(made.ptr, numbers.ctypes.data, numbers.nbytes, executor.stream.c_handle.value)
        executor.stream.synchronize()
    return made


def _clears(request: SdpaRequest) -> tuple[Clear, ...]:
    """Zeros for what no engine writes: behind the end of a padded sequence, and O of one without keys."""
    if not request.padded or request.pages is not None:
        return ()
    gradients = () if request.packed else ("dq", "dk", "dv")
    names = ("out",) if isinstance(request, SdpaFwdRequest) else gradients
    return tuple(clear for name in names for clear in zero_fills(request.place_of(name), request.layout_of(name)))
