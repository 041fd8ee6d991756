"""Structured sparsity: matrices with at most two nonzeros of four elements (one of two for f32), and their products.

Computed by cuSPARSELt on sparse tensor cores, or by NumPy on the host. A compressed operand of a request is its bytes
and a `StructuredForm` (form.py); a `StructuredTensor` (tensor.py) holds both. The files: compression, product (the
requests), layout (of matrices in memory, and of the host's compressed ones), cusparselt (the plans), tune, reference
(results by NumPy), rules, cases; and functions, which are public as `dispatch.structured`.
"""

from __future__ import annotations

from dispatch.core.plan_call import plan_call
from dispatch.core.request_function import request_function
from dispatch.ops.structured.compression import Check24Request, Compress24Request, Prune24Request
from dispatch.ops.structured.form import PruneAlgorithm, StructuredForm
from dispatch.ops.structured.product import Activation24, Matmul24Request, SplitKMode

__all__ = ["Activation24", "PruneAlgorithm", "SplitKMode", "StructuredForm"]
__all__ += ["Check24Request", "Compress24Request", "Matmul24Request", "Prune24Request"]
__all__ += ["check_2_4", "compress_2_4", "matmul_2_4", "prune_2_4"]

cusparselt_plan = plan_call("cusparselt_plan", "dispatch.ops.structured.cusparselt", "A plan of cuSPARSELt's calls.")

prune_2_4 = request_function(Prune24Request, "prune_2_4")
check_2_4 = request_function(Check24Request, "check_2_4")
compress_2_4 = request_function(Compress24Request, "compress_2_4")
matmul_2_4 = request_function(Matmul24Request, "matmul_2_4")
