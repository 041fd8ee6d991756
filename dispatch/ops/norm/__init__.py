"""Normalization and its gradient: `norm_fwd` and `norm_bwd`, by layer, root mean square, batch, instance and group.

`NormFwdRequest` and `NormBwdRequest` are the requests; `cudnn_norm` and `numpy_norm` make their plans, `reference`
computes the expected results, `cases` has the test cases. The files: request (fields and checks), graph, group (several
graphs), cudnn, reference, rules (for the table), cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.host_plan import numpy_call
from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.norm.reference import evaluate
from dispatch.ops.norm.request import NormBwdRequest, NormMode

if TYPE_CHECKING:
    from dispatch.ops.norm.results import NormFwdRequest, norm_fwd
else:
    from dispatch.ops.norm.request import NormFwdRequest

    norm_fwd = request_function(NormFwdRequest, "norm_fwd")

__all__ = [
    "NormBwdRequest",
    "NormFwdRequest",
    "NormMode",
    "norm_bwd",
    "norm_fwd",
]


cudnn_norm = plan_call(
    "cudnn_norm",
    "dispatch.ops.norm.cudnn",
    "A plan that ends in `cudnnBackendExecute`; Refused with cuDNN's reason where no engine takes the graph.",
)
numpy_norm = numpy_call(evaluate)
norm_bwd = request_function(NormBwdRequest, "norm_bwd")
