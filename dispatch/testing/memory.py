"""Operands in guarded memory: a view inside a larger buffer of poison, which tells what was written beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.keys import Dtype

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["POISON_BYTE", "GuardedBuffer", "Mismatch", "poison"]

POISON_BYTE = 0x5A


class Mismatch(AssertionError):
    """An output that is further from the reference than its bound, or memory beside an output that was written."""


def poison(dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Values that show when they are read or left: NaN, or 0x5A in every byte where the dtype has none."""
    if dtype.numpy.kind in "iu":
        size = int(np.prod(shape)) * dtype.itemsize
        return np.full(size, POISON_BYTE, np.uint8).view(dtype.numpy).reshape(shape)
    return np.full(shape, np.nan, dtype.numpy)


@dataclass(frozen=True)
class GuardedBuffer:
    """A view inside a larger buffer, and the buffer as it was."""

    view: Tensor
    whole: Tensor
    before: Array
    inside: tuple[Any, ...]

    @classmethod
    def lay(
        cls, device: Device, values: Array, *, columns: bool = False, padding: int = 0, guard: int = 0
    ) -> GuardedBuffer:
        """Put (…, rows, cols) values on a device, in column-major order if `columns`, with poison around them.

        `padding` elements follow every line, `guard` lines stand before and behind every matrix.
        """
        lines = np.swapaxes(values, -1, -2) if columns else values
        *batch, count, extent = lines.shape
        dtype = Dtype.of(values.dtype)
        before = poison(dtype, (*batch, count + 2 * guard, extent + padding))
        inside = (..., slice(guard, guard + count), slice(0, extent))
        before[inside] = lines
        whole = device.array(before)
        view = whole[inside]
        return cls(view.mT if columns else view, whole, before, inside)

    def renew(self) -> None:
        """Lay the buffer as it was: poison, or what is read before it is written."""
        self.whole.copy_from(self.before)

    def disturbed(self) -> int:
        """The number of bytes outside the view that differ from what they were."""
        after = self.whole.numpy()
        after[self.inside] = self.before[self.inside]
        return int(np.count_nonzero(_bytes(after) != _bytes(self.before)))


def _bytes(values: Array) -> Array:
    """The bytes of all elements: NaN compares equal to itself."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
