"""Scaled dot product attention and its gradient: `sdpa_fwd` and `sdpa_bwd`, fused by cuDNN.

`SdpaFwdRequest` and `SdpaBwdRequest` are the requests; `cudnn_sdpa` and `numpy_sdpa` make their plans, `reference`
computes the expected results, `cases` has the test cases. The files: base and request (fields and checks), packed
(sequences without padding), graph, cudnn, reference, rules (for the table), cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.host_plan import numpy_call
from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.sdpa.packed import ragged_offsets
from dispatch.ops.sdpa.reference import evaluate
from dispatch.ops.sdpa.request import Diagonal, SdpaBwdRequest

if TYPE_CHECKING:
    from dispatch.ops.sdpa.results import SdpaFwdRequest, sdpa_fwd
else:
    from dispatch.ops.sdpa.request import SdpaFwdRequest

    sdpa_fwd = request_function(SdpaFwdRequest, "sdpa_fwd")

__all__ = [
    "Diagonal",
    "SdpaBwdRequest",
    "SdpaFwdRequest",
    "ragged_offsets",
    "sdpa_bwd",
    "sdpa_fwd",
]


cudnn_sdpa = plan_call(
    "cudnn_sdpa",
    "dispatch.ops.sdpa.cudnn",
    "A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph.",
)
numpy_sdpa = numpy_call(evaluate)
sdpa_bwd = request_function(SdpaBwdRequest, "sdpa_bwd")
