"""Launches of this library's own kernels, used by plans of several families: at the addresses and numbers of a run.

Some of a kernel's parameters change in each run, the others are fixed. `kernel.py` launches users' own kernels; this
file also has numbers as kernel parameters, and memory that is 0 when a plan is made.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.keys import C64, C128, F64, U8, Dtype
from dispatch.libraries.cusolver.matrix import Matrix
from dispatch.libraries.nvrtc.kernel import loaded, permit_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = [
    "DoublePair",
    "KernelStep",
    "LaunchPlan",
    "LaunchStep",
    "SinglePair",
    "Strides",
    "check",
    "cleared",
    "launch_of",
    "number_of",
]

Source = tuple[str, str, tuple[str, ...]]  # of a kernel: the source, the kernel's name in it, and NVRTC's options


class SinglePair(ctypes.Structure):
    """A c64 as a kernel parameter."""

    _fields_ = (("real", ctypes.c_float), ("imag", ctypes.c_float))


class DoublePair(ctypes.Structure):
    """A c128 as a kernel parameter."""

    _fields_ = (("real", ctypes.c_double), ("imag", ctypes.c_double))


PAIRS = {C64: SinglePair, C128: DoublePair}


def number_of(dtype: Dtype) -> Any:
    """A number as a parameter of a kernel for a dtype: a pair for a complex one, f32 for 16-bit dtypes."""
    return PAIRS[dtype]() if dtype in PAIRS else ctypes.c_double() if dtype is F64 else ctypes.c_float()


def cleared(executor: CudaExecutor, counters: int, others: int) -> Tensor:
    """A plan's scratch memory: `counters` bytes that are 0, followed by `others` bytes."""
    scratch = executor.empty((counters + others,), (1,), U8)
    # A plan is made outside of the caller's captures, and of the executor's recordings.
    driver.cuMemsetD8Async(scratch.ptr, 0, counters, executor.stream.c_handle.value)
    return scratch


def launch_of(
    executor: CudaExecutor,
    kernel: Source,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    taken: Sequence[Any],
    shared: int = 0,
) -> Callable[[], int]:
    """A function that launches a kernel with the current values of `taken`, which its caller keeps alive.

    `shared` are bytes of dynamic shared memory. The function returns the driver's status.
    """
    pointers = (ctypes.c_void_p * len(taken))(*map(ctypes.addressof, taken))
    extents = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
    function = loaded(*kernel, executor.device)
    permit_shared(function, shared)
    fixed = (ctypes.c_void_p(function), *extents, shared, executor.target, pointers, None)
    return partial(driver.cuLaunchKernel.unchecked, *fixed)


def check(executor: CudaExecutor, status: int) -> None:
    """Raise the error of a launch, if it failed."""
    if status:
        executor.stream.done()  # raises DeviceFault if the device is lost
        raise driver.error("cuLaunchKernel", status)


SLOTS = ("_executor", "_given", "_launch", "_pairs", "_slots")


class Launching:
    """A launch at the addresses and numbers of each run; subclasses declare SLOTS, because Plan has its own slots."""

    __slots__ = ()
    _executor: CudaExecutor
    _given: tuple[Any, ...]
    _launch: Callable[[], int]
    _pairs: tuple[tuple[Any, int], ...]
    _slots: tuple[tuple[Any, int], ...]

    def _prepare(
        self,
        executor: CudaExecutor,
        kernel: Source,
        extents: tuple[int, int],
        filled: Sequence[tuple[Any, int | None]],
        given: Sequence[Any],
        shared: int = 0,
    ) -> None:
        """Load the kernel, and prepare its parameters.

        Args:
            executor: launches on its stream.
            kernel: its source, its name in the source, and NVRTC's options.
            extents: blocks, and threads of a block.
            filled: the parameters that change in each run, with their indices among the arguments; without an index,
                one stays a null pointer.
            given: the parameters after them.
            shared: bytes of dynamic shared memory.
        """
        indexed = [(slot, index) for slot, index in filled if index is not None]
        pairs = tuple(item for item in indexed if isinstance(item[0], ctypes.Structure))
        slots = tuple(item for item in indexed if not isinstance(item[0], ctypes.Structure))
        parameters, (blocks, threads) = (*(slot for slot, _ in filled), *given), extents
        launch = launch_of(executor, kernel, (blocks,), (threads,), parameters, shared)
        fields = executor, parameters, launch, pairs, slots
        self._executor, self._given, self._launch, self._pairs, self._slots = fields  # type: ignore[misc]  # its classes' slots

    def enqueue(self, arguments: Sequence[Any]) -> None:
        """Launch the kernel at these addresses and numbers."""
        for slot, index in self._slots:
            slot.value = arguments[index]
        for pair, index in self._pairs:
            number = arguments[index]
            pair.real, pair.imag = number.real, number.imag
        check(self._executor, self._launch())


class LaunchPlan(Launching, Plan):
    """A plan of one launch; `scratch` is memory whose address the kernel takes, `shared` its dynamic shared memory."""

    __slots__ = (*SLOTS, "_scratch")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        kernel: Source,
        extents: tuple[int, int],
        filled: Sequence[tuple[Any, int | None]],
        given: Sequence[Any],
        scratch: Tensor | None = None,
        shared: int = 0,
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._scratch = scratch
        self._prepare(executor, kernel, extents, filled, given, shared)


class LaunchStep(Launching):
    """One launch, as a step of a plan."""

    __slots__ = SLOTS

    def __init__(
        self,
        executor: CudaExecutor,
        kernel: Source,
        extents: tuple[int, int],
        filled: Sequence[tuple[Any, int | None]],
        given: Sequence[Any],
    ) -> None:
        self._prepare(executor, kernel, extents, filled, given)


class Strides(ctypes.Structure):
    """The kernels' struct of the same name: elements from one row, column and matrix of a batch to the next."""

    _fields_ = (("row", ctypes.c_int64), ("col", ctypes.c_int64), ("batch", ctypes.c_int64))

    @classmethod
    def of(cls, matrix: Matrix) -> Strides:
        """The strides of a matrix."""
        return cls(matrix.row_stride, matrix.col_stride, matrix.pointer.batch_stride // matrix.dtype.itemsize)


class KernelStep:
    """One launch on the operands of each run, as a step of a plan.

    Arguments are converted: an OperandPointer or a View to an address, a Matrix to an address and Strides, None to the
    null pointer, a member of an enum to an int, another int to a 64-bit one, and a float to a double. ctypes objects
    are passed unchanged.
    """

    __slots__ = ("_executor", "_given", "_launch", "_slots")

    def __init__(
        self,
        executor: CudaExecutor,
        kernel: Source,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        given: Sequence[Any],
    ) -> None:
        self._executor = executor
        self._slots: list[tuple[ctypes.c_void_p, int, int]] = []
        self._given = tuple(part for argument in given for part in self._prepared(argument))
        self._launch = launch_of(executor, kernel, grid, block, self._given)

    def _prepared(self, one: Any) -> tuple[Any, ...]:
        if isinstance(one, Matrix):
            return *self._prepared(one.pointer), Strides.of(one)
        if hasattr(one, "operand"):  # also cuFFT's views
            slot = ctypes.c_void_p()
            self._slots.append((slot, one.operand, one.offset))
            return (slot,)
        if one is None:
            return (ctypes.c_void_p(),)
        if isinstance(one, IntEnum):
            return (ctypes.c_int(one),)
        if isinstance(one, (ctypes._SimpleCData, ctypes.Structure)):
            return (one,)
        return (ctypes.c_double(one) if isinstance(one, float) else ctypes.c_int64(one),)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Launch the kernel at these addresses."""
        for slot, operand, offset in self._slots:
            slot.value = addresses[operand] + offset
        check(self._executor, self._launch())
