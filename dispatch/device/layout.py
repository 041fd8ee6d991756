"""Layout: device, dtype, shape and strides of a view, interned; plans are keyed by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.keys import Dtype

__all__ = ["Array", "Layout", "c_strides"]

Array = np.ndarray[Any, np.dtype[Any]]
COUNTED = 1 << 16  # up to so many elements, interleaved axes are checked for overlap element by element


class Layout:
    """Device, dtype, shape and strides (in elements) of a view, and the alignment of its pointer in bytes, up to 256.

    Its device interns it: equal layouts are nearly always one object, so a plan is found by identity. `low` and `high`
    bound the view in bytes, relative to its pointer: it touches [ptr + low, ptr + high).
    """

    __slots__ = ("_meets", "alignment", "device", "dtype", "high", "low", "readonly", "shape", "size", "strides")

    def __init__(
        self,
        device: Device,
        dtype: Dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        alignment: int,
        readonly: bool,
    ) -> None:
        self.device, self.dtype, self.shape, self.strides = device, dtype, shape, strides
        self.alignment, self.readonly = alignment, readonly
        self._meets: bool | None = None
        reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        self.size = math.prod(shape)
        self.low = sum(r for r in reach if r < 0) * dtype.bits // 8 if self.size else 0
        self.high = (sum(r for r in reach if r > 0) * dtype.bits + dtype.bits + 7) // 8 if self.size else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the view is dense in C order."""
        return self.size == 0 or all(
            extent == 1 or stride == dense
            for extent, stride, dense in zip(self.shape, self.strides, c_strides(self.shape), strict=True)
        )

    @property
    def fills_bytes(self) -> bool:
        """Whether its elements, in any order, fill their range of bytes without gaps."""
        axes = [(stride, extent) for stride, extent in zip(self.strides, self.shape, strict=True) if extent > 1]
        step = 1
        for stride, extent in sorted((abs(stride), extent) for stride, extent in axes):
            if stride != step:
                return self.size == 0
            step *= extent
        first = sum((extent - 1) * stride for stride, extent in axes if stride < 0)  # the lowest offset
        return step * self.dtype.bits % 8 == 0 and first * self.dtype.bits % 8 == 0

    @property
    def meets_itself(self) -> bool:
        """Whether two of its elements share an address, as in broadcast views and overlapping windows.

        Exact up to `COUNTED` elements; larger views with interleaved axes always count as such.
        """
        if self._meets is None:
            self._meets = self._do_meet()
        return self._meets

    def _do_meet(self) -> bool:
        axes = [(abs(stride), extent) for stride, extent in zip(self.strides, self.shape, strict=True) if extent > 1]
        reach, is_nested = 0, True
        for stride, extent in sorted(axes):
            is_nested = is_nested and stride > reach
            reach += (extent - 1) * stride
        if is_nested or self.size == 0:
            return False
        if self.size > COUNTED or any(stride == 0 for stride, _ in axes):
            return True
        places = np.zeros(1, np.int64)
        for stride, extent in axes:
            places = np.add.outer(places, stride * np.arange(extent)).ravel()
        return len(np.unique(places)) < len(places)

    def frame(self) -> Array:
        """A NumPy array of this shape and these strides without real memory, for NumPy's indexing rules."""
        item = self.dtype.numpy.itemsize  # a packed 4-bit element counts as one byte here
        blank = np.empty(1, f"V{item}")  # as_strided does not support ml_dtypes
        return as_strided(blank, self.shape, tuple(s * item for s in self.strides))

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return text if self.is_contiguous else f"{text} element strides ({', '.join(map(str, self.strides))})"

    __repr__ = __str__


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a dense C-order array."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))
