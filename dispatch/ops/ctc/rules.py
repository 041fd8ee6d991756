"""What a CTC row asks of a request beyond its dtypes.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.core.axes import describable

if TYPE_CHECKING:
    from dispatch.ops.ctc.request import CtcRequest

__all__ = ["at_most_255", "dense_logits"]

MAX_LABELS = 255


def at_most_255(request: CtcRequest) -> str:
    """cuDNN 9.19 has no kernel for longer sequences of labels (NOT_SUPPORTED)."""
    longest = request.max_label_length
    return "" if longest <= MAX_LABELS else f"needs max_label_length up to {MAX_LABELS}, has {longest}"


def dense_logits(request: CtcRequest) -> str:
    """Logits and gradient in row-major order."""
    for name in ("logits", *request.made()):
        layout = request.layout_of(name)
        if reason := describable(layout):
            return reason
        if not layout.is_contiguous:
            return f"needs {name} dense, has {layout}: copy it with dev.array(x.numpy())"
    return ""
