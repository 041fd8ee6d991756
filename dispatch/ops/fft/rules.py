"""What the rows of Fourier transforms need beyond their dtypes: each rule gives "needs …, has …", or ""."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.ops.fft.request import DftRequest

__all__ = ["aligned"]


def aligned(request: DftRequest) -> str:
    """No operand begins between two elements."""
    for name in (*request.reads, *request.writes):
        if name in request.reads and getattr(request, name) is None:
            continue
        layout = request.layout_of(name)
        if layout.size and layout.alignment < layout.dtype.itemsize:
            return f"needs {name} at a multiple of {layout.dtype.itemsize} bytes, has {layout.alignment}: copy it"
    return ""
