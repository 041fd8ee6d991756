"""How matrices lie: cuBLAS's are column-major, and a row-major one is to it the transpose.

A result that is row-major is computed as its transpose, from operands of which each is its transpose, too. An operand
may lie otherwise than the result where a flag of the routine turns it, or nothing but its triangle is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dispatch.device.layout import Layout

__all__ = ["Arrangement", "Group", "Misfit", "arranged", "leading", "misplaced"]


class Misfit(Exception):
    """Why cuBLAS cannot take an operand as it lies."""


class Group(NamedTuple):
    """Operands that lie alike; `is_free` where that may be another way than the result does."""

    names: tuple[str, ...]
    is_free: bool


class Arrangement(NamedTuple):
    """Which matrices are taken to be row-major: the result, and each operand."""

    out: bool
    rows: dict[str, bool]


def leading(layout: Layout, *, row: bool) -> int | None:
    """The elements from line to line of a row-major, or column-major, matrix; None where it is not one.

    That is of the last two axes. Strides along an axis of one element mean nothing.
    """
    (rows, columns), (down, along) = layout.shape[-2:], layout.strides[-2:]
    lines, width, step, within = (rows, columns, down, along) if row else (columns, rows, along, down)
    if width > 1 and within != 1:
        return None
    if lines <= 1:
        return max(width, 1)
    return step if step >= max(width, 1) else None


def misplaced(layout: Layout) -> str:
    """What is wrong with an operand that begins within an element, or ""."""
    size = layout.dtype.itemsize
    if layout.size and layout.alignment < size:
        return f"needs {layout.dtype} at multiples of {size} bytes, has {layout.alignment}: copy it"
    return ""


def arranged(request: Any, groups: tuple[Group, ...], *, rows_first: bool = True) -> Arrangement | str:
    """How a request's matrices are taken, or in words why cuBLAS cannot take them without a copy.

    A result that may be taken either way is taken to be row-major, if `rows_first`.
    """
    names = ("out", *(name for group in groups for name in group.names))
    layouts = {name: request.layout_of(name) for name in names}
    ways: dict[str, list[bool]] = {}
    for name, layout in layouts.items():
        if text := misplaced(layout):
            return f"{name}: {text}"
        ways[name] = [row for row in (True, False) if leading(layout, row=row) is not None]
        if layout.size == 0:
            ways[name] = [True, False]
        if not ways[name]:
            return f"needs {name} row-major or column-major, with adjacent elements in each line, has {layout}: copy it"
    failed = ""
    for out in sorted(ways["out"], reverse=rows_first):
        rows: dict[str, bool] = {}
        for group in groups:
            order = (out, not out) if group.is_free else (out,)
            found = next((row for row in order if all(row in ways[name] for name in group.names)), None)
            if found is None:
                name = next((name for name in group.names if out not in ways[name]), group.names[-1])
                other = "out" if not group.is_free else group.names[0]
                failed = failed or (
                    f"needs {name} in the order of {other} ({_word(ways[other])}), has {layouts[name]}: copy it"
                )
                break
            rows |= dict.fromkeys(group.names, found)
        else:
            return Arrangement(out, rows)
    return failed


def _word(ways: list[bool]) -> str:
    return " or ".join("row-major" if row else "column-major" for row in ways)
