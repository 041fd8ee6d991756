"""Numbers as cuBLAS's routines read them: in host memory, of the type that a compute type asks for."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dispatch.keys import Dtype

__all__ = ["HostNumber"]


class HostNumber:
    """A number of any dtype, f16 and i32 among them; `address` is what cuBLAS is given."""

    __slots__ = ("_memory", "address")

    def __init__(self, dtype: Dtype) -> None:
        self._memory = np.zeros(1, dtype.numpy)
        self.address = ctypes.c_void_p(self._memory.ctypes.data)

    def set(self, value: complex) -> None:
        """Write the number."""
        self._memory[0] = value if self._memory.dtype.kind == "c" else value.real
