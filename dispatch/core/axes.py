"""Axes of tensors for cuDNN's descriptors: adjacent axes are merged if memory allows, and padded to four.

Plans of ops that treat axes alike (elementwise, along one axis, over several) use it, so that a tensor of any rank fits
a descriptor of four to eight extents. Pure arithmetic; it knows no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.layout import Layout

__all__ = ["LIMIT", "Axis", "alike", "describable", "gapless", "gaps_left_open", "merge", "strides_apart"]

LIMIT = 2**31 - 1  # cuDNN's extents and strides are C ints


class Axis(NamedTuple):
    """An extent, its stride in each of the tensors, and the group that it belongs to."""

    extent: int
    strides: tuple[int, ...]
    group: int


def merge(layouts: Sequence[Layout], groups: Sequence[int], *, in_order: bool = False) -> list[Axis]:
    """The axes of tensors of one shape; neighbours of one group are merged if every tensor has one stride for both.

    Neighbours are adjacent in the first tensor's memory, or with `in_order` in the shape. Axes of extent 1 are dropped.
    A tensor may have extent 1 where the first has more (the result of a reduction); its stride is 0 there. Tensors
    without elements have no axes.
    """
    if layouts[0].size == 0:
        return []
    axes = []
    for place, (extent, group) in enumerate(zip(layouts[0].shape, groups, strict=True)):
        if extent != 1:
            strides = tuple(layout.strides[place] if layout.shape[place] == extent else 0 for layout in layouts)
            axes.append(Axis(extent, strides, group))
    if not in_order:
        axes.sort(key=lambda axis: -abs(axis.strides[0]))
    merged: list[Axis] = []
    for axis in axes:
        if merged and merged[-1].group == axis.group:
            before = merged[-1]
            if all(outer == inner * axis.extent for outer, inner in zip(before.strides, axis.strides, strict=True)):
                merged[-1] = axis._replace(extent=before.extent * axis.extent)
                continue
        merged.append(axis)
    return merged


def alike(one: Layout, other: Layout) -> bool:
    """Whether two tensors of one shape have the same strides.

    Strides of axes of one element are ignored, and all strides of a tensor without elements.
    """
    axes = zip(one.shape, one.strides, other.strides, strict=True)
    return one.size == 0 or all(extent == 1 or first == second for extent, first, second in axes)


def strides_apart(request: Any, first: str, *others: str) -> str:
    """For a rule: the reason if an operand's strides differ from those of the first, else ""."""
    layout = request.layout_of(first)
    other = next((name for name in others if not alike(layout, request.layout_of(name))), None)
    return f"needs {other} with the strides of {first} {layout}, has {request.layout_of(other)}" if other else ""


def gapless(layout: Layout) -> bool:
    """Whether a tensor of positive strides has no gaps in memory, with its axes in any order."""
    reach = 1 + sum((extent - 1) * step for extent, step in zip(layout.shape, layout.strides, strict=True))
    return layout.size == 0 or reach == layout.size


def gaps_left_open(request: Any, first: str) -> str:
    """For a rule: the reason if an operand has gaps and `out` is not given; an allocated output is dense."""
    layout = request.layout_of(first)
    if request.out is not None or gapless(layout):
        return ""
    return f"needs {first} without gaps unless out is passed, has {layout}: copy it with {first}.copy()"


def describable(*layouts: Layout) -> str:
    """For a rule: the reason if cuDNN's descriptors cannot express one of the layouts, else "".

    A tensor without elements needs no descriptor, because nothing is launched.
    """
    for layout in layouts:
        if not layout.size:
            continue
        if layout.alignment < layout.dtype.itemsize:
            return f"needs {layout.dtype} at multiples of {layout.dtype.itemsize} bytes, has {layout.alignment}"
        strides = [step for extent, step in zip(layout.shape, layout.strides, strict=True) if extent > 1]
        if min(strides, default=1) < 1:
            return f"needs positive strides, has {layout}: copy it with dev.array(x)"
        if max((layout.size, *layout.shape, *strides), default=0) > LIMIT:
            return f"needs extents, strides and sizes up to {LIMIT}, has {layout}"
    return ""
