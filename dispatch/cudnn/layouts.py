"""How images lie in memory: the strides of dense tensors (N, C, spatial…) with their channels first or last.

Requests, rules and drawings ask here. Pure arithmetic; it knows no library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.tensor import Layout

__all__ = ["dense_strides", "lies_dense"]

Shape = tuple[int, ...]


def dense_strides(shape: Shape, *, last: bool) -> Shape:
    """The strides of a dense tensor, channels last or first."""
    order = (0, *range(2, len(shape)), 1) if last else tuple(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def lies_dense(layout: Layout, *, last: bool) -> bool:
    """Whether a tensor is dense, with its channels last or first; axes of extent 1 lie either way."""
    wanted = dense_strides(layout.shape, last=last)
    return all(e == 1 or s == t for e, s, t in zip(layout.shape, layout.strides, wanted, strict=True))
