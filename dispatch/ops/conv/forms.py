"""The sizes and layouts of the test cases of convolutions, for all libraries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dispatch.libraries.cudnn.convolve import Steps

__all__ = ["OPERANDS", "Form"]

Shape = tuple[int, ...]
OPERANDS = {"conv_fwd": ("x", "w", "y"), "conv_bwd_data": ("y", "w", "x"), "conv_bwd_filter": ("y", "x", "w")}


@dataclass(frozen=True)
class Form:
    """Sizes and layouts: everything about a case but its dtypes. `order` is "first", "last" or "gaps" (neither)."""

    name: str
    x: Shape
    w: Shape
    pad: Any = 0
    stride: int | Shape = 1
    dilation: int | Shape = 1
    order: str = "last"
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def steps(self) -> Steps:
        """Padding, stride and dilation as in the request."""
        rank = len(self.x) - 2
        pairs = self.pad if isinstance(self.pad, tuple) else (self.pad,) * rank
        pairs = tuple(one if isinstance(one, tuple) else (one, one) for one in pairs)
        stride, dilation = (v if isinstance(v, tuple) else (v,) * rank for v in (self.stride, self.dilation))
        return Steps(tuple(p for p, _ in pairs), tuple(p for _, p in pairs), stride, dilation)
