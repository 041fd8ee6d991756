"""The memory layout of operands: strides of dense images, channels first or last; merged axes; rules of alignment.

Requests, rules and builders of cuDNN graphs use it. It is arithmetic only and knows no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.keys import I32, I64

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Request
    from dispatch.device.layout import Layout

__all__ = [
    "ALIGNED",
    "aligned",
    "at_16_bytes",
    "at_multiples",
    "dense_image",
    "dense_strides",
    "lies_dense",
    "merge_axes",
]

Shape = tuple[int, ...]
ALIGNED = 16  # bytes that an engine may load at once


def dense_strides(shape: Shape, *, last: bool) -> Shape:
    """The strides of a dense tensor, with channels last or first."""
    order = (0, *range(2, len(shape)), 1) if last else tuple(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def lies_dense(layout: Layout, *, last: bool) -> bool:
    """Whether a tensor is dense with channels last or first.

    Strides of axes of extent 1 are ignored, and all strides of a tensor without elements.
    """
    axes = zip(layout.shape, layout.strides, dense_strides(layout.shape, last=last), strict=True)
    return layout.size == 0 or all(extent == 1 or stride == dense for extent, stride, dense in axes)


def dense_image(name: str, layout: Layout) -> str:
    """The reason for a refusal if an image is not dense with channels first or last, else ""."""
    is_dense = lies_dense(layout, last=False) or lies_dense(layout, last=True)
    return "" if is_dense else f"needs {name} dense with channels first or last, has {layout}"


def aligned(request: Request[Any]) -> str:
    """Every operand begins at a multiple of its element size."""
    return at_multiples(request)


def at_multiples(request: Request[Any], nbytes: int | None = None) -> str:
    """The reason for a refusal if an operand does not begin at a multiple of `nbytes`, or of its element size."""
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        alignment = layout.dtype.itemsize if nbytes is None else nbytes
        if layout.size and layout.alignment < alignment:
            return f"needs {name} at a multiple of {alignment} bytes, has {layout.alignment}: copy it"
    return ""


def at_16_bytes(request: Request) -> str:
    """Every operand begins at a multiple of 16 bytes, except single elements and integer tensors (lengths, offsets).

    cuDNN's backend gets the alignment of operands, but still accepts graphs with a smaller one. It then refuses to run
    them, reads from the previous multiple, so that results are wrong, or loses the device (seen on an H200, 9.19).
    """
    for name, tensor, _ in request.tensors():
        layout = tensor.layout
        if layout.size > 1 and layout.alignment < ALIGNED and layout.dtype not in (I32, I64):
            return f"needs {name} at a multiple of {ALIGNED} bytes, has {layout.alignment}: copy it"
    return ""


def merge_axes(dims: Shape, steps: Sequence[Shape]) -> tuple[list[int], list[Shape]]:
    """Merge neighbouring axes that are one axis in every operand, and drop axes of extent 1.

    `steps` has the strides of each operand along these axes. The result is the extents of the merged axes, and for each
    of them the stride of each operand.
    """
    extents: list[int] = []
    merged: list[Shape] = []
    for axis, extent in enumerate(dims):
        if extent == 1:
            continue
        strides = tuple(step[axis] for step in steps)
        if extents and all(before == now * extent for before, now in zip(merged[-1], strides, strict=True)):
            extents[-1] *= extent
            merged[-1] = strides
        else:
            extents.append(extent)
            merged.append(strides)
    return extents, merged
