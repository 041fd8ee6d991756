"""Grouped products by one CUTLASS kernel: D = tree(A[rows of group g] · B[g]) for groups of any number of rows.

`cutlass_grouped_gemm` is the request function, `CutlassGroupedGemmRequest` the request; `cutlass_plan` and `numpy_plan`
carry it out, `reference` says what is right. The rooms: request, rules, cutlass (on a GPU), host, trials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.ops.cutlass_grouped_gemm.request import CutlassGroupedGemmRequest
from dispatch.request import run

if TYPE_CHECKING:
    from dispatch.cutlass.evt import Node
    from dispatch.lane import CudaLane, Lane
    from dispatch.request import Plan
    from dispatch.row import Row
    from dispatch.tensor import Array, Tensor

__all__ = ["CutlassGroupedGemmRequest", "cutlass_grouped_gemm", "cutlass_plan", "numpy_plan", "reference"]


def cutlass_plan(request: CutlassGroupedGemmRequest, lane: CudaLane, row: Row) -> Plan:
    """A plan that ends in a grouped CUTLASS kernel, which is compiled where it is in no cache."""
    from dispatch.ops.cutlass_grouped_gemm import cutlass  # at first use: importing `dispatch` looks for no headers

    return cutlass.plan(request, lane, row)


def numpy_plan(_request: CutlassGroupedGemmRequest, _lane: Lane, row: Row) -> Plan:
    """A plan that computes with NumPy, group by group."""
    from dispatch.ops.cutlass_grouped_gemm import host

    return host.plan(row)


def reference(request: CutlassGroupedGemmRequest) -> dict[str, Array]:
    """What a request's output is in float64."""
    from dispatch.ops.cutlass_grouped_gemm import host

    return host.reference(request)


def cutlass_grouped_gemm(
    a: Tensor,
    b: Tensor,
    ends: Tensor,
    *,
    out: Tensor | None = None,
    epilogue: Node | None = None,
    alpha: Tensor | float = 1.0,
    out_dtype: Any = None,
    fast_accum: bool = False,
) -> Tensor:
    """Multiply rows of a (total, k), in groups, by b (groups, k, n), on the current stream; returns without waiting.

    The arguments are the fields of `CutlassGroupedGemmRequest`. Returns D (total, n). Raises BadRequest for operands
    that do not fit, NoRow where no kernel takes the request.
    """
    result: Tensor = run(CutlassGroupedGemmRequest(a, b, ends, out, epilogue, alpha, out_dtype, fast_accum))
    return result
