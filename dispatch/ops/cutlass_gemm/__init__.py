"""Products by CUTLASS kernels with epilogue trees: D = tree(A · B, C, operands).

`cutlass_gemm` is the request function, `CutlassGemmRequest` the request; `cutlass_plan`, `blackwell_plan`,
`multistage_plan` and `numpy_plan` carry it out, `reference` says what is right. The rooms: request (what may be asked),
layout and rules (for the table), cutlass, tune, rival, blackwell and multistage (on a GPU), host, trials (what is
tested). Kernels come from `dispatch.cutlass`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.cutlass_gemm.request import CutlassGemmRequest
from dispatch.request import run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dispatch.cutlass.config import Config
    from dispatch.cutlass.evt import Node
    from dispatch.keys import Compute
    from dispatch.lane import CudaLane, Lane
    from dispatch.request import Plan
    from dispatch.row import Row
    from dispatch.tensor import Array, Tensor

__all__ = [
    "CutlassGemmRequest",
    "blackwell_plan",
    "cutlass_gemm",
    "cutlass_plan",
    "multistage_plan",
    "numpy_plan",
    "reference",
]


def cutlass_plan(request: CutlassGemmRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in a CUTLASS kernel, which is compiled where it is in no cache."""
    from dispatch.ops.cutlass_gemm import cutlass  # at first use: importing `dispatch` looks for no headers

    return cutlass.plan(request, lane, row)


def blackwell_plan(request: CutlassGemmRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in a kernel for sm_100a or sm_120a."""
    from dispatch.ops.cutlass_gemm import blackwell

    return blackwell.plan(request, lane, row)


def multistage_plan(request: CutlassGemmRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in a multistage kernel, which every GPU since sm_80 runs."""
    from dispatch.ops.cutlass_gemm import multistage

    return multistage.plan(request, lane, row)


def numpy_plan(_request: CutlassGemmRequest, _lane: Lane, row: Row) -> Plan:
    """A plan that computes with NumPy."""
    from dispatch.ops.cutlass_gemm import host

    return host.plan(row)


def reference(request: CutlassGemmRequest) -> dict[str, Array]:
    """What a request's outputs are in float64, by name."""
    from dispatch.ops.cutlass_gemm import host

    return host.reference(request)


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
