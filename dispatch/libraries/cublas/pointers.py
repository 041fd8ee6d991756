"""Arrays of pointers for cuBLAS's batched routines: in the plan's own memory, written by a kernel before each call.

The kernel receives the address of each operand, so a recorded call follows its operands like any other call. Pointers
copied from the host would be those of the call that was recorded.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.keys import I64, U8
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.libraries.nvrtc.launching import check, launch_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.request import Argument
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["ARRAYS_SOURCE", "PointerArray", "PointerArrays"]

THREADS = 256
SOURCE = r"""
extern "C" __global__ void point(char* base, const long long* offsets, char** found, long long count)
{
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < count) found[i] = base + offsets[i];
}
"""
POINTERS_PER_LAUNCH = 480  # addresses per launch, passed by value in at most 4096 bytes of arguments
ARRAYS_SOURCE = f"""
struct Given {{ long long words[{POINTERS_PER_LAUNCH}]; }};
extern "C" __global__ void put(const __grid_constant__ Given given, long long* found, long long count)
{{
    for (long long i = threadIdx.x; i < count; i += blockDim.x) found[i] = given.words[i];
}}
"""
POINTER = 8  # bytes
ARRAY_ALIGNMENT = 16  # bytes; alignment of the lists, which some versions require


class PointerArray:
    """The addresses of an operand's matrices, at byte offsets from its own; `address` is the array's memory."""

    __slots__ = ("_base", "_executor", "_given", "_index", "_launch", "_memory", "address")

    def __init__(self, executor: CudaExecutor, index: int, offsets: Sequence[int]) -> None:
        count = len(offsets)
        self._executor, self._index = executor, index
        self._memory = executor.empty((2, count), (count, 1), I64)
        offsets_on_host = np.ascontiguousarray(offsets, np.int64)
        driver.cuMemcpyHtoDAsync(
            self._memory.ptr, offsets_on_host.ctypes.data, offsets_on_host.nbytes, executor.stream.c_handle.value
        )
        executor.stream.synchronize()  # once per plan: the offsets are read from temporary memory
        self.address = ctypes.c_void_p(self._memory.ptr + offsets_on_host.nbytes)
        self._base = ctypes.c_void_p()
        self._given = (self._base, ctypes.c_void_p(self._memory.ptr), self.address, ctypes.c_longlong(count))
        kernel = (SOURCE, "point", ("-std=c++17",))
        self._launch = launch_of(executor, kernel, (-(-count // THREADS),), (THREADS,), self._given)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Write the addresses for a run."""
        address = arguments[self._index]
        self._base.value = int(address.real) or None
        check(self._executor, self._launch())


class PointerArrays:
    """Several lists of addresses without a common base, such as those of A, B and C of each product.

    The addresses are arguments of the launches that write them, so a recorded call contains them. `addresses` is the
    device memory of each list.
    """

    __slots__ = ("_executor", "_function", "_memory", "addresses")

    def __init__(self, executor: CudaExecutor, count: int, lists: int) -> None:
        step = -(-count * POINTER // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
        self._executor = executor
        self._memory: Tensor = executor.empty((lists * step,), (1,), U8)
        self.addresses = tuple(ctypes.c_void_p(self._memory.ptr + number * step) for number in range(lists))
        self._function = loaded(ARRAYS_SOURCE, "put", ("-std=c++17",), executor.device)

    def enqueue(self, given: Sequence[Sequence[int]]) -> None:
        """Write the lists for a run: for each product its address in each list."""
        for target, words in zip(self.addresses, zip(*given, strict=True), strict=True):
            for first in range(0, len(words), POINTERS_PER_LAUNCH):
                part = words[first : first + POINTERS_PER_LAUNCH]
                self._put(part, (target.value or 0) + first * POINTER)

    def _put(self, words: Sequence[int], target: int) -> None:
        values = (ctypes.c_int64 * POINTERS_PER_LAUNCH)(*words)
        launch_arguments: tuple[Any, ...] = (values, ctypes.c_void_p(target), ctypes.c_longlong(len(words)))
        pointers = (ctypes.c_void_p * len(launch_arguments))(*map(ctypes.addressof, launch_arguments))
        stream = self._executor.target.value or 0
        driver.cuLaunchKernel(self._function, 1, 1, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(pointers), 0)
