"""Row-major and column-major matrices: cuBLAS is column-major, so a row-major matrix is passed as its transpose.

A row-major result is computed as its transpose, from the transposes of its operands. An operand may have the opposite
order of the result if a flag of the routine transposes it, or if only its triangle is exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = ["Arrangement", "LayoutGroup", "UnsupportedLayout", "arrange", "leading_dimension", "misalignment"]


class UnsupportedLayout(Exception):
    """The reason why cuBLAS does not support an operand of this layout."""


class LayoutGroup(NamedTuple):
    """Operands of the same order; `is_free` if it may differ from the order of the result."""

    names: tuple[str, ...]
    is_free: bool


class Arrangement(NamedTuple):
    """The matrices that are treated as row-major: the result (`out`), and each operand (`rows`)."""

    out: bool
    rows: dict[str, bool]


def leading_dimension(layout: Layout, *, row: bool) -> int | None:
    """The leading dimension of a row-major, or column-major, matrix of the last two axes; None if it is neither.

    Strides along an axis of one element are ignored.
    """
    (rows, columns), (down, along) = layout.shape[-2:], layout.strides[-2:]
    lines, width, step, within = (rows, columns, down, along) if row else (columns, rows, along, down)
    if width > 1 and within != 1:
        return None
    if lines <= 1:
        return max(width, 1)
    return step if step >= max(width, 1) else None


def misalignment(layout: Layout) -> str:
    """The misalignment of an operand relative to its elements, in words, or ""."""
    size = layout.dtype.itemsize
    if layout.size and layout.alignment < size:
        return f"needs {layout.dtype} at multiples of {size} bytes, has {layout.alignment}: copy it"
    return ""


def arrange(request: Any, groups: tuple[LayoutGroup, ...], *, rows_first: bool = True) -> Arrangement | str:
    """The arrangement of a request's matrices, or the reason why cuBLAS needs a copy of them.

    A result that is both row-major and column-major is treated as row-major if `rows_first`.
    """
    names = ("out", *(name for group in groups for name in group.names))
    layouts = {name: request.layout_of(name) for name in names}
    orders: dict[str, list[bool]] = {}
    for name, layout in layouts.items():
        if text := misalignment(layout):
            return f"{name}: {text}"
        orders[name] = [row for row in (True, False) if leading_dimension(layout, row=row) is not None]
        if layout.size == 0:
            orders[name] = [True, False]
        if not orders[name]:
            return f"needs {name} row-major or column-major, with adjacent elements in each line, has {layout}: copy it"
    failed = ""
    for out in sorted(orders["out"], reverse=rows_first):
        rows: dict[str, bool] = {}
        for group in groups:
            allowed = (out, not out) if group.is_free else (out,)
            order = next((row for row in allowed if all(row in orders[name] for name in group.names)), None)
            if order is None:
                name = next((name for name in group.names if out not in orders[name]), group.names[-1])
                reference = "out" if not group.is_free else group.names[0]
                expected = f"{name} in the order of {reference} ({_order_names(orders[reference])})"
                failed = failed or f"needs {expected}, has {layouts[name]}: copy it"
                break
            rows |= dict.fromkeys(group.names, order)
        else:
            return Arrangement(out, rows)
    return failed


def _order_names(orders: list[bool]) -> str:
    return " or ".join("row-major" if row else "column-major" for row in orders)
