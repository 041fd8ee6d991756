"""The operands that cuSPARSE supports for sliced and blocked ELL: each rule returns "needs …, has …", or ""."""

from __future__ import annotations

from typing import Any

__all__ = ["added_elements", "aligned_blocks", "power_of_2_blocks"]

ALIGNMENT = 16  # bytes; tensor cores load operands in such units


def added_elements(request: Any) -> str:
    """A matrix with elements if something is added; without elements the result would be zeros."""
    empty = not request.values.size or not (request.x if request.op == "sell_mv" else request.b).size
    return "needs a matrix with elements if an operand is added, has none" if empty and request.reads_added else ""


def power_of_2_blocks(request: Any) -> str:
    """Blocks whose size is a power of 2 above 1."""
    block = request.block
    return "" if block > 1 and block & (block - 1) == 0 else f"needs blocks of a power of 2, has {block}"


def aligned_blocks(request: Any) -> str:
    """Values, B and C at multiples of 16 bytes."""
    for name in ("values", "b", "out"):
        layout = request.layout_of(name)
        if layout.size and layout.alignment < ALIGNMENT:
            return f"needs {name} at a multiple of {ALIGNMENT} bytes, has {layout.alignment}: copy it"
    return ""
