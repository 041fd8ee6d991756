"""Products by CUTLASS kernels with epilogue trees: D = tree(A · B, C, operands).

`cutlass_gemm` is the request function, `CutlassGemmRequest` the request; `cutlass_plan`, `blackwell_plan`,
`multistage_plan` and `numpy_plan` carry it out, reference.py says what is right. Files: request (what may be asked),
layout and rules (for the table), cutlass, tune, cublaslt_candidate, sm100 and sm80 (on a GPU), reference, cases (what
is tested). Kernels come from `dispatch.libraries.cutlass`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.core.request import run
from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest

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

__all__ = [
    "CutlassGemmRequest",
    "cutlass_gemm",
]


def cutlass_plan(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a CUTLASS kernel, which is compiled where it is in no cache."""
    from dispatch.ops.cutlass_gemm import cutlass  # at first use: importing `dispatch` looks for no headers

    return cutlass.plan(request, executor, row)


def blackwell_plan(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a kernel for sm_100a or sm_120a."""
    from dispatch.ops.cutlass_gemm import sm100 as blackwell

    return blackwell.plan(request, executor, row)


def multistage_plan(request: CutlassGemmRequest, executor: CudaExecutor, row: Row) -> Plan:
    """A plan that ends in a multistage kernel, which every GPU since sm_80 runs."""
    from dispatch.ops.cutlass_gemm import sm80 as multistage

    return multistage.plan(request, executor, row)


def numpy_plan(_request: CutlassGemmRequest, _executor: Executor, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.ops.cutlass_gemm import reference as host

    return host.plan(row)


def cutlass_gemm(
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor | None = None,
    out: Tensor | None = None,
    epilogue: Node | None = None,
    operands: Mapping[str, Tensor | float] | None = None,
    alpha: Tensor | float = 1.0,
    beta: Tensor | float | None = None,
    compute: Compute | None = None,
    out_dtype: Any = None,
    fast_accum: bool = False,
    config: Config | None = None,
    autotune: bool = False,
) -> Any:
    """Multiply a (…, m, k) by b (…, k, n) and apply an epilogue tree, on the current stream; returns without waiting.

    The arguments are the fields of `CutlassGemmRequest`. Returns D, or D and the tree's other outputs in its order. The
    first call for a kernel compiles it (15 to 40 s; later ones load it from disk). Raises BadRequest for operands that
    do not fit, NoRow where no kernel takes the request, CompileFailed where NVRTC refuses one.
    """
    choices = (compute, out_dtype, fast_accum, config, autotune)
    return run(CutlassGemmRequest(a, b, c, out, epilogue, operands, alpha, beta, *choices))
