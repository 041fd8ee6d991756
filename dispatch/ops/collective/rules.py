"""Rules of the rows of collectives: dense memory, parts of one size, enough ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.collective.request import RedOp

if TYPE_CHECKING:
    from dispatch.ops.collective.request import RanksRequest

__all__ = ["dense", "even_parts", "several_ranks"]


def dense(request: RanksRequest[object]) -> str:
    """Rule: libraries count elements, and support no strides."""
    for name, tensor, _ in request.tensors():
        if not tensor.layout.is_contiguous:
            return f"needs {name} dense in C order, has {tensor.layout}"
    return ""


def even_parts(request: RanksRequest[object]) -> str:
    """Rule: parts of one size."""
    counts = getattr(request, "send_counts", None)
    return "" if counts is None else f"needs parts of one size, has send_counts={counts}"


def several_ranks(request: RanksRequest[object]) -> str:
    """Rule: with one rank NCCL fails for PREMUL_SUM of fp8 (ncclInvalidArgument)."""
    how = getattr(request, "red_op", None)
    alone = how is RedOp.PREMUL_SUM and request.ranks.size == 1
    return "needs two ranks or more for premul_sum of fp8, has one" if alone else ""
