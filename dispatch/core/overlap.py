"""Whether tensors share memory, and what shapes broadcast to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.device.tensor import Tensor


__all__ = ["Shape", "broadcast", "may_overlap", "overlap", "same_view"]

Shape = tuple[int, ...]


def broadcast(one: Shape, other: Shape) -> Shape:
    """The shape that two shapes broadcast to; ValueError if they do not."""
    return one if one == other else np.broadcast_shapes(one, other)


def may_overlap(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> bool:
    """Whether byte ranges of an output and another operand overlap: a quick test, true for interleaved views, too."""
    for place, out in enumerate(writes):
        low, high = out.ptr + out.layout.low, out.ptr + out.layout.high
        for other in (*reads, *writes[place + 1 :]):
            if other.ptr + other.layout.low < high and low < other.ptr + other.layout.high:
                return True
    return False


def same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same view: the same elements of the same memory, in the same order."""
    return (one.ptr, one.dtype, one.shape) == (other.ptr, other.dtype, other.shape) and (
        one.layout.strides == other.layout.strides
    )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share a byte; exact also for interleaved views."""
    first, second = one.layout, other.layout
    if one.ptr + first.high <= other.ptr + second.low or other.ptr + second.high <= one.ptr + first.low:
        return False
    if one.size == 0 or other.size == 0:
        return False
    try:
        return bool(np.shares_memory(_ghost(one), _ghost(other), max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Interface:
    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def _ghost(tensor: Tensor) -> Any:
    """A NumPy array at a tensor's address, never read; NumPy's overlap solver needs only addresses and strides."""
    item = max(tensor.dtype.itemsize, 1)
    face = {
        "data": (tensor.ptr, True),
        "typestr": f"|V{item}",
        "shape": tensor.shape,
        "strides": tuple(s * item for s in tensor.layout.strides),
        "version": 3,
    }
    return np.asarray(_Interface(face))
