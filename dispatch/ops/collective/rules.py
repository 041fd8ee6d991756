"""Rules of the rows of collectives: memory as libraries count it, and parts of one size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.ops.collective.request import RanksRequest

__all__ = ["dense", "even"]


def dense(request: RanksRequest[object]) -> str:
    """Rule: libraries count elements, and know no strides."""
    for name, tensor, _ in request.tensors():
        if not tensor.layout.is_contiguous:
            return f"needs {name} dense in C order, has {tensor.layout}"
    return ""


def even(request: RanksRequest[object]) -> str:
    """Rule: parts of one size."""
    counts = getattr(request, "send_counts", None)
    return "" if counts is None else f"needs parts of one size, has send_counts={counts}"
