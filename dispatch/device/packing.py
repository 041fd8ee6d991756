"""4-bit elements, which are packed two to a byte in memory and take a byte each in NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["check_dense", "packed", "unpacked"]


def packed(tensor: Tensor, array: Array) -> Array:
    """4-bit elements packed two to a byte, the first in the low half; other dtypes unchanged."""
    if tensor.dtype.bits != 4:
        return array
    check_dense(tensor)
    nibbles = np.ascontiguousarray(array).view(np.uint8).ravel() & 0xF
    nibbles = np.append(nibbles, np.uint8(0)) if nibbles.size % 2 else nibbles
    return np.asarray(nibbles[0::2] | nibbles[1::2] << 4)


def unpacked(tensor: Tensor, pairs: Array) -> Array:
    """The elements of a 4-bit tensor from its bytes."""
    nibbles = np.stack([pairs & 0xF, pairs >> 4], axis=-1).ravel()[: tensor.size]
    return np.asarray(nibbles.view(tensor.dtype.numpy).reshape(tensor.shape))


def check_dense(tensor: Tensor) -> None:
    """BadRequest unless a tensor of packed elements can be copied whole."""
    if not tensor.layout.is_contiguous:
        raise BadRequest("tensor", str(tensor.layout), "a dense tensor, because 4-bit elements are copied as bytes")
