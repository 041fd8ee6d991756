"""Host memory, as NumPy arrays, for devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from dispatch.checks import check_dtype, check_shape
from dispatch.errors import OutOfMemory

__all__ = ["array_kind", "host_memory", "host_shortage"]

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
        raise host_shortage(error) from error


def host_shortage(error: BaseException) -> OutOfMemory:
    """The error for memory that NumPy could not allocate; what it could not allocate is added if NumPy says so."""
    words = str(error)
    return OutOfMemory(f"the host is out of memory: {words}" if words else "the host is out of memory")
