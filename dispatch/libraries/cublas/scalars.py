"""Scalars for cuBLAS's routines: in host memory, in the type that the compute type requires."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["HostNumber"]


class HostNumber:
    """A number of any dtype, including f16 and i32; `address` is passed to cuBLAS."""

    __slots__ = ("_memory", "address")

    def __init__(self, dtype: Dtype) -> None:
        self._memory = np.zeros(1, dtype.numpy)
        self.address = ctypes.c_void_p(self._memory.ctypes.data)

    def set(self, value: complex) -> None:
        """Write the number."""
        self._memory[0] = value if self._memory.dtype.kind == "c" else value.real
