"""Arrays of pointers for cuBLAS's batched routines: in memory of the plan's own, written by a kernel before each call.

The kernel is given the address of each operand, so that a recorded call follows its operands as any other does; copied
from the host the pointers would be those of the call that was recorded.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cudabind import driver
from dispatch.keys import I64
from dispatch.libraries.nvrtc.kernel import loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Pointers"]

THREADS = 256
SOURCE = r"""
extern "C" __global__ void point(char* base, const long long* offsets, char** found, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) found[i] = base + offsets[i];
}
"""


class Pointers:
    """The addresses of an operand's matrices, so many bytes behind its own; `address` is where the device has them."""

    __slots__ = ("_base", "_executor", "_index", "_keep", "_launch", "_memory", "address")

    def __init__(self, executor: CudaExecutor, index: int, offsets: Sequence[int]) -> None:
        count = len(offsets)
        self._executor, self._index = executor, index
        self._memory = executor.empty((2, count), (count, 1), I64)
        told = np.ascontiguousarray(offsets, np.int64)
        driver.cuMemcpyHtoDAsync(self._memory.ptr, told.ctypes.data, told.nbytes, executor.stream.c_handle.value)
        executor.stream.synchronize()  # once a plan: the numbers are read from memory that goes
        self.address = ctypes.c_void_p(self._memory.ptr + told.nbytes)
        self._base = ctypes.c_void_p()
        taken = (self._base, ctypes.c_void_p(self._memory.ptr), self.address, ctypes.c_longlong(count))
        pointers = (ctypes.c_void_p * len(taken))(*map(ctypes.addressof, taken))
        self._keep = (taken, pointers)
        function = loaded(SOURCE, "point", ("-std=c++17",), executor.device)
        extents = (-(-count // THREADS), 1, 1, THREADS, 1, 1)
        fixed = (ctypes.c_void_p(function), *extents, 0, executor.target, pointers, None)
        self._launch = partial(driver.cuLaunchKernel.unchecked, *fixed)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Write the addresses for a run."""
        address = arguments[self._index]
        self._base.value = int(address.real) or None
        if status := self._launch():
            self._executor.stream.done()  # raises DeviceFault where it is the device that is lost
            raise driver.error("cuLaunchKernel", status)
