"""What a row of cutlass_grouped_gemm asks of a request beyond its dtypes: what tensor maps can step through.

Each rule gives the reason in the words "needs …, has …", or "" where the request is fine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.ops.cutlass_gemm.layout import order_of
from dispatch.ops.cutlass_gemm.rules import lines_by_16

if TYPE_CHECKING:
    from dispatch.ops.cutlass_grouped_gemm.request import CutlassGroupedGemmRequest

__all__ = ["by_16_bytes", "k_dense", "no_fast_accum", "rows_dense", "some_elements"]


def by_16_bytes(request: CutlassGroupedGemmRequest) -> str:
    """Each group of each matrix starts at a multiple of 16 bytes, and so does each line."""
    matrices = (("a", request.a), ("b", request.b), ("out", request.out))
    wrong = [reason for name, tensor in matrices if tensor is not None and (reason := lines_by_16(name, tensor))]
    return f"needs {' and '.join(wrong)}" if wrong else ""


def rows_dense(request: CutlassGroupedGemmRequest) -> str:
    """A group is some rows of A and D."""
    wrong = [name for name, t in (("a", request.a), ("out", request.out)) if t is not None and order_of(t) != "row"]
    return f"needs dense rows, has {' and '.join(wrong)} with dense columns" if wrong else ""


def k_dense(request: CutlassGroupedGemmRequest) -> str:
    """Hopper's tensor cores read fp8 along k only."""
    return "" if order_of(request.b) == "column" else "needs b column-major (k dense), has rows"


def some_elements(request: CutlassGroupedGemmRequest) -> str:
    """Nothing is launched for nothing; a single group may be empty, as only the device knows."""
    return "" if request.k and request.groups and all(request.shape) else "needs extents of 1 or more, has none"


def no_fast_accum(request: CutlassGroupedGemmRequest) -> str:
    """Fast accumulation is a choice of fp8 products."""
    return "needs fast_accum=False, has True" if request.fast_accum else ""
