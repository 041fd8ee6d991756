"""What the rows of Fourier transforms need beyond their dtypes: each rule gives "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.core.operands import OperandRequest

__all__ = ["aligned"]


def aligned(request: OperandRequest[Any]) -> str:
    """No operand begins between two elements."""
    for name in (*request.reads, *request.writes):
        if name in request.reads and getattr(request, name) is None:
            continue
        layout = request.layout_of(name)
        if layout.size and layout.alignment < layout.dtype.itemsize:
            return f"needs {name} at a multiple of {layout.dtype.itemsize} bytes, has {layout.alignment}: copy it"
    return ""
