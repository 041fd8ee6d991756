"""The plan of an attention request with cuDNN's backend: one unified operation, or the composed graph.

`plan` serves the table's GPU rows. Every version of cuDNN supports the composed graph. The unified operation is tried
first if the installed cuDNN has it and it supports everything in the request.
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

OFFSETS_FROM = Arch(90)  # engines support offsets of sequences from this architecture on
UNIFIED = 91300  # the first cuDNN with CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR


def policy_of(request: SdpaRequest, row: Row) -> Policy:
    """Sums are in f32; only a gradient may depend on the order of its sums, unless it is to be deterministic."""
    del row
    deterministic = isinstance(request, SdpaBwdRequest) and request.deterministic
    return Policy(True, deterministic, WORKSPACE * 4 if request.workspace is None else request.workspace)


def plan(request: SdpaRequest, executor: CudaExecutor, row: Row) -> Plan:
    """Bind a request to an executor; Refused with cuDNN's message if no engine supports it."""
    policy, tune = policy_of(request, row), request.autotune
    if isinstance(request, SdpaFwdRequest) and request.alone and cudnn.cudnnGetVersion() >= UNIFIED:
        with suppress(Refused):
            graph, places, _ = unified_graph(request)
            return bind(request, executor, row, graph, places, policy, autotune=tune)
    fills: tuple[Fill, ...] = ()
    if isinstance(request, SdpaFwdRequest) and request.mask:
        # Engines skip blocks in which no query attends to a key, and write no mask there (9.19).
        fills = (Fill(request.place_of("mask_out"), 0.0, prod(request.scores)),)
    # For one query, the engine reads only existing keys without offsets, too, and takes a third longer with them.
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
    bound_plan = bind(request, executor, row, graph, places, policy, autotune=tune)
    return with_prefill(executor, bound_plan, fills, _clears(request))


def _plan_by_offsets(
    request: SdpaRequest, executor: CudaExecutor, row: Row, policy: Policy, fills: tuple[Fill, ...]
) -> Plan:
    """The plan of padded sequences described by offsets: engines then write nothing after the end of a sequence."""
    graph, places, strides = composed_graph(request, by_offsets=True)
    number = np.arange(request.scores[0] + 1, dtype=np.int64)
    extra = tuple(_i64_tensor(executor, number * stride) for stride in strides)
    bound_plan = bind(request, executor, row, graph, places, policy, autotune=request.autotune, extra=extra)
    if isinstance(request, SdpaFwdRequest) and request.stats:
        fills += (Fill(request.place_of("stats_out"), -math.inf, prod(request.scores[:3])),)
    return with_prefill(executor, bound_plan, fills, _clears(request))


def _i64_tensor(executor: CudaExecutor, numbers: np.ndarray[Any, Any]) -> Tensor:
    """An i64 tensor, copied on the executor's own stream, which may not be the calling thread's current one."""
    tensor = executor.empty(numbers.shape, (1,), I64)
    with executor.device.context:
        driver.cuMemcpyHtoDAsync(tensor.ptr, numbers.ctypes.data, numbers.nbytes, executor.stream.c_handle.value)
        executor.stream.synchronize()
    return tensor


def _clears(request: SdpaRequest) -> tuple[Clear, ...]:
    """Zeros for memory that no engine writes: after the end of a padded sequence, and O of a sequence without keys."""
    if not request.padded or request.pages is not None:
        return ()
    gradients = () if request.packed else ("dq", "dk", "dv")
    names = ("out",) if isinstance(request, SdpaFwdRequest) else gradients
    return tuple(clear for name in names for clear in zero_fills(request.place_of(name), request.layout_of(name)))
