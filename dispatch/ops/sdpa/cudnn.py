"""An attention request carried out by cuDNN's backend: as one unified operation, or as the composed graph.

The table's GPU rows end here, by `plan`. Every version takes the composed graph; the unified operation is tried first
where the installed cuDNN has it and the request has nothing that it lacks.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod
from typing import TYPE_CHECKING

from cudabind.sys import cudnn
from dispatch.cudnn.engines import Policy
from dispatch.cudnn.filled import Fill, filled
from dispatch.cudnn.plan import WORKSPACE, bind
from dispatch.errors import Refused
from dispatch.ops.sdpa.describe import composed, unified
from dispatch.ops.sdpa.request import SdpaBwdRequest, SdpaFwdRequest

if TYPE_CHECKING:
    from dispatch.lane import CudaLane
    from dispatch.ops.sdpa.request import SdpaRequest
    from dispatch.request import Plan
    from dispatch.row import Row

__all__ = ["plan", "policy_of"]

UNIFIED = 91300  # the first cuDNN with CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR


def policy_of(request: SdpaRequest, row: Row) -> Policy:
    """Sums are in f32; only a gradient may depend on the order of its sums, where it is allowed to."""
    del row
    deterministic = isinstance(request, SdpaBwdRequest) and request.deterministic
    return Policy(True, deterministic, WORKSPACE * 4 if request.workspace is None else request.workspace)


def plan(request: SdpaRequest, lane: CudaLane, row: Row) -> Plan:
    """Bind a request to a lane; Refused with cuDNN's words where no engine takes it."""
    policy, tune = policy_of(request, row), request.autotune
    if isinstance(request, SdpaFwdRequest) and request.alone and cudnn.cudnnGetVersion() >= UNIFIED:
        with suppress(Refused):
            return bind(request, lane, row, *unified(request), policy, autotune=tune)
    made = bind(request, lane, row, *composed(request), policy, autotune=tune)
    if isinstance(request, SdpaFwdRequest) and request.mask:
        # Engines pass over blocks that no query sees, and write no mask there (9.19).
        return filled(lane, made, (Fill(request.place_of("mask_out"), 0.0, prod(request.scores)),))
    return made
