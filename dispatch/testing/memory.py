"""Operands in guarded memory: a view inside a larger buffer of poison, which shows writes outside of the view."""

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
    """An output differs from the reference by more than its bound, or memory around an output was written."""


def poison(dtype: Dtype, shape: tuple[int, ...]) -> Array:
    """Values that reveal a wrong read or a missing write: NaN, or 0x5A in every byte if the dtype has no NaN."""
    if dtype.numpy.kind in "iu":
        size = int(np.prod(shape)) * dtype.itemsize
        return np.full(size, POISON_BYTE, np.uint8).view(dtype.numpy).reshape(shape)
    return np.full(shape, np.nan, dtype.numpy)


@dataclass(frozen=True)
class GuardedBuffer:
    """A view inside a larger buffer, and the original contents of the buffer."""

    view: Tensor
    whole: Tensor
    before: Array
    inside: tuple[Any, ...]

    @classmethod
    def lay(
        cls, device: Device, values: Array, *, columns: bool = False, padding: int = 0, guard: int = 0
    ) -> GuardedBuffer:
        """Put (…, rows, cols) values on a device, in column-major order if `columns`, with poison around them.

        `padding` elements follow every line, `guard` lines precede and follow every matrix.
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
        """Restore the original contents: poison, or values that are read before they are written."""
        self.whole.copy_from(self.before)

    def disturbed(self) -> int:
        """The number of bytes outside the view that have changed."""
        after = self.whole.numpy()
        after[self.inside] = self.before[self.inside]
        return int(np.count_nonzero(_bytes(after) != _bytes(self.before)))


def _bytes(values: Array) -> Array:
    """The bytes of all elements: NaN compares equal to itself."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
