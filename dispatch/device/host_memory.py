"""Host memory, as NumPy arrays, for devices; 4-bit elements are packed two to a byte, and take a byte each in NumPy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_dtype, check_shape
from dispatch.errors import BadRequest, DispatchError, OutOfMemory

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["array_kind", "check_dense", "host_memory", "host_shortage", "needing_memory", "packed", "unpacked"]

Array = np.ndarray[Any, np.dtype[Any]]


def array_kind(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """A shape and a dtype in NumPy's types; BadRequest if one of them is invalid."""
    kind = check_dtype("dtype", dtype)
    return check_shape("shape", shape, kind.numpy.itemsize * 8), kind.numpy


def host_memory(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """An uninitialized NumPy array; OutOfMemory if there is not enough."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError, OverflowError) as error:  # the latter two for sizes beyond the address space
        elements = math.prod(shape) if isinstance(shape, tuple) else shape
        raise host_shortage(error, elements * np.dtype(dtype).itemsize) from error


class NeedingMemory:
    """Blocks whose arrays need memory of the host: NumPy's MemoryError in them becomes OutOfMemory."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, MemoryError) and not isinstance(error, DispatchError):
            raise host_shortage(error) from error


needing_memory = NeedingMemory()  # one for all blocks: making it would take as long as the block itself


def host_shortage(error: BaseException, nbytes: int | None = None) -> OutOfMemory:
    """The error for memory that NumPy could not allocate: how many bytes, or what the error says if that is unknown."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if nbytes is None and isinstance(shape, tuple) and isinstance(dtype, np.dtype):  # NumPy's own kind of MemoryError
        nbytes = math.prod(shape) * dtype.itemsize
    words = str(error) if nbytes is None else f"{nbytes:,} bytes ({nbytes / 2**30:,.1f} GiB) could not be allocated"
    return OutOfMemory(f"the host is out of memory: {words}" if words else "the host is out of memory")


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
