"""Plans of einsum by the kernel of network_kernel.py: all steps of small tensors in one launch of one block.

The plan owns the memory of the kernel's program, and of the data that does not fit in shared memory. Its runs are
sequential on one stream; other plans have memory of their own.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import IdlePlan, Plan
from dispatch.keys import U8, U32
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.libraries.nvrtc.launching import check
from dispatch.ops.contraction.network import program_of
from dispatch.ops.contraction.network_kernel import NAME, POINTERS, SOURCE, options

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.device.cuda import CudaDevice
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.contraction.einsum import EinsumRequest
    from dispatch.ops.contraction.network import Program

__all__ = ["NetworkPlan", "plan"]

QUAD, LANES = 16, 32


class Pointers(ctypes.Structure):
    """The addresses of the operands, followed by that of the result."""

    _fields_ = (("at", ctypes.c_uint64 * POINTERS),)


class NetworkPlan(Plan):
    """One launch of one block. `memory` holds the program, and the data if it does not fit in shared memory."""

    __slots__ = ("_addresses", "_executor", "_launch", "_memory", "_values")

    def __init__(
        self, executor: CudaExecutor, row: Row, function: int, program: Program, shared: int, memory: tuple[Tensor, ...]
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._executor, self._memory = executor, memory
        words, *spill = memory
        pointers = Pointers()
        self._addresses = pointers.at
        quads = program.words.nbytes // QUAD
        data_bytes = ctypes.c_void_p(spill[0].ptr if spill else None)
        values = (pointers, ctypes.c_void_p(words.ptr), ctypes.c_int(quads), data_bytes)
        parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        self._values = values  # `parameters` points to it
        fixed = (
            ctypes.c_void_p(function),
            1,
            1,
            1,
            LANES * program.warps,
            1,
            1,
            shared,
            executor.target,
            parameters,
            None,
        )
        self._launch: Callable[[], int] = partial(driver.cuLaunchKernel.unchecked, *fixed)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        self._addresses[: len(arguments)] = arguments  # all of them are addresses
        check(self._executor, self._launch())


def plan(request: EinsumRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: one launch, or nothing if the result has no elements."""
    if not request.out_layout().size:
        return IdlePlan(row)
    program = program_of(request)
    most, width = most_shared(executor.device), max(request.dtype.itemsize, ctypes.sizeof(ctypes.c_float))
    shared, data_bytes = program.words.nbytes, program.elements * width
    in_shared = shared + data_bytes <= most
    function = loaded(SOURCE, NAME, options(request.dtype, in_shared=in_shared), executor.device)
    kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    driver.cuFuncSetAttribute(function, kind, most)  # the same for all plans of the kernel
    memory = [on_device(executor, program)]
    if in_shared:
        shared += data_bytes
    else:
        memory.append(executor.empty((data_bytes,), (1,), U8))
    return NetworkPlan(executor, row, function, program, shared, tuple(memory))


def most_shared(device: CudaDevice) -> int:
    """The bytes of shared memory that a block may have if its kernel requests them."""
    return device.attribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)


def on_device(executor: CudaExecutor, program: Program) -> Tensor:
    """The words of a program in memory of the plan; plans are made outside of captures and recordings."""
    words = program.words
    tensor: Any = executor.empty(words.shape, (1,), U32)
    driver.cuMemcpyHtoDAsync(tensor.ptr, words.ctypes.data, words.nbytes, executor.stream.c_handle.value)
    executor.stream.synchronize()  # the words may be freed before the copy runs
    memory: Tensor = tensor
    return memory
