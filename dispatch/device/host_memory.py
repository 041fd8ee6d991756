"""Memory of the host as NumPy's arrays have it, for devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from dispatch.checks import check_dtype, check_shape
from dispatch.errors import OutOfMemory

__all__ = ["array_kind", "host_memory"]

Array = np.ndarray[Any, np.dtype[Any]]


def array_kind(shape: Any, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the NumPy dtype that are meant; BadRequest for what is none."""
    kind = check_dtype("dtype", dtype)
    return check_shape("shape", shape, kind.numpy.itemsize * 8), kind.numpy


def host_memory(shape: int | tuple[int, ...], dtype: Any) -> Array:
    """An uninitialized NumPy array; OutOfMemory where there is not enough."""
    try:
        return np.empty(shape, dtype)
    except (MemoryError, ValueError, OverflowError) as error:  # the latter two where no address space has so much
        raise OutOfMemory(f"the host is out of memory: {error}") from error
