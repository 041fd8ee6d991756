"""The layout of a matrix in the two words that kernels use: which lines are dense, and the stride between them.

A family's rules check whether a kernel supports a layout, and its plans write the strides into a kernel's parameters.
This file chooses no kernel.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["alignment", "dense_line", "lines_by_16", "order", "order_of", "pitch"]

Pair = tuple[int, ...]


def order(shape: Pair, strides: Pair) -> str:
    """Which lines of the last two axes are dense, "row" or "column"; either for a matrix that is a single line."""
    (rows, columns), (down, right) = shape[-2:], strides[-2:]
    by_row = right == 1 or columns == 1
    by_column = down == 1 or rows == 1
    if by_row and by_column:  # a vector: the stride along its length determines its order
        return "row" if (rows == 1 and right == 1) or (columns == 1 and down != 1) else "column"
    return "row" if by_row else "column"


def order_of(tensor: Tensor) -> str:
    """The order of a tensor's last two axes."""
    return order(tensor.shape, tensor.layout.strides)


def pitch(shape: Pair, strides: Pair) -> int:
    """The stride between dense lines in elements; for a single line, its length rounded up as tensor maps need it."""
    by_row = order(shape, strides) == "row"
    lines, length = (shape[-2], shape[-1]) if by_row else (shape[-1], shape[-2])
    return (strides[-2] if by_row else strides[-1]) if lines > 1 else -(-length // 16) * 16


def alignment(shape: Pair, strides: Pair, itemsize: int, address: int) -> int:
    """The most bytes, up to 16, that a matrix's address, its lines' strides and their length are all multiples of."""
    strides_in_bytes = [s * itemsize for s, extent in zip(strides, shape, strict=True) if extent > 1 and s != 1]
    length = shape[-1] if order(shape, strides) == "row" else shape[-2]
    return gcd(16, address, length * itemsize, *strides_in_bytes)


def dense_line(tensor: Tensor) -> bool:
    """Whether rows or columns are dense, and lines follow each other in order, without overlap."""
    shape, strides = tensor.shape, tensor.layout.strides
    by_row = order(shape, strides) == "row"
    length, lines = (shape[-1], shape[-2]) if by_row else (shape[-2], shape[-1])
    step, over = (strides[-1], strides[-2]) if by_row else (strides[-2], strides[-1])
    return (step == 1 or length == 1) and (lines == 1 or over >= length) and min(strides[:-2], default=0) >= 0


def lines_by_16(name: str, tensor: Tensor) -> str:
    """The reason why a tensor map cannot describe a matrix; "" if it can."""
    if tensor.layout.alignment < 16:
        return f"{name} at a multiple of 16 bytes, has {tensor.layout.alignment}"
    if not dense_line(tensor):
        return f"{name} with dense rows or columns, has {tensor.layout}"
    dense = tensor.ndim - (1 if order_of(tensor) == "row" else 2)
    axes = enumerate(zip(tensor.layout.strides, tensor.shape, strict=True))
    strides = [step for axis, (step, extent) in axes if extent > 1 and axis != dense]
    if any(step * tensor.dtype.bits % 128 for step in strides):
        return f"{name} with lines at multiples of 16 bytes, has {tensor.layout}"
    return ""
