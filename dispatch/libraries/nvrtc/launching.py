"""Launches of this library's own kernels, which plans of several families make: at the addresses and numbers of a run.

A kernel takes what each run fills in, and what is the same in all of them. Beside `kernel.py`, where those of a user's
own are launched, here are numbers as kernels take them and memory that is 0 as a plan begins.
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
from dispatch.libraries.nvrtc.kernel import loaded

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

Source = tuple[str, str, tuple[str, ...]]  # of a kernel, its name there, and NVRTC's options


class SinglePair(ctypes.Structure):
    """A c64 as a kernel takes it."""

    _fields_ = (("real", ctypes.c_float), ("imag", ctypes.c_float))


class DoublePair(ctypes.Structure):
    """A c128 as a kernel takes it."""

    _fields_ = (("real", ctypes.c_double), ("imag", ctypes.c_double))


PAIRS = {C64: SinglePair, C128: DoublePair}


def number_of(dtype: Dtype) -> Any:
    """A number as a kernel over a dtype takes it: a pair of a complex one, f32 for those of 16 bits."""
    return PAIRS[dtype]() if dtype in PAIRS else ctypes.c_double() if dtype is F64 else ctypes.c_float()


def cleared(executor: CudaExecutor, counters: int, others: int) -> Tensor:
    """Memory of a plan: so many bytes, which are 0, and others behind them."""
    scratch = executor.empty((counters + others,), (1,), U8)
    # A plan is made outside of what its caller captures, and of what the executor records.
    driver.cuMemsetD8Async(scratch.ptr, 0, counters, executor.stream.c_handle.value)
    return scratch


def launch_of(
    executor: CudaExecutor, kernel: Source, grid: tuple[int, ...], block: tuple[int, ...], taken: Sequence[Any]
) -> Callable[[], int]:
    """What launches a kernel with what `taken` holds then, which its caller keeps; it gives the driver's status."""
    pointers = (ctypes.c_void_p * len(taken))(*map(ctypes.addressof, taken))
    extents = (*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
    function = ctypes.c_void_p(loaded(*kernel, executor.device))
    return partial(driver.cuLaunchKernel.unchecked, function, *extents, 0, executor.target, pointers, None)


def check(executor: CudaExecutor, status: int) -> None:
    """Raise what a launch ended in."""
    if status:
        executor.stream.done()  # raises DeviceFault where it is the device that is lost
        raise driver.error("cuLaunchKernel", status)


SLOTS = ("_executor", "_given", "_launch", "_pairs", "_slots")


class Launching:
    """A launch for the addresses and numbers of each run; a class of it has SLOTS, for a plan has slots of its own."""

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
    ) -> None:
        """Load the kernel, and put together what it takes.

        Args:
            executor: on whose stream it is launched.
            kernel: its source, its name there, and NVRTC's options.
            extents: blocks, and threads of a block.
            filled: what each run fills in, with its place among the arguments; what has none stays as it is, a null
                pointer.
            given: what it takes behind them.
        """
        there = [(slot, place) for slot, place in filled if place is not None]
        pairs = tuple(one for one in there if isinstance(one[0], ctypes.Structure))
        slots = tuple(one for one in there if not isinstance(one[0], ctypes.Structure))
        taken, (blocks, threads) = (*(slot for slot, _ in filled), *given), extents
        launch = launch_of(executor, kernel, (blocks,), (threads,), taken)
        found = executor, taken, launch, pairs, slots
        self._executor, self._given, self._launch, self._pairs, self._slots = found  # type: ignore[misc]  # its classes' slots

    def enqueue(self, arguments: Sequence[Any]) -> None:
        """Launch it for some addresses and numbers."""
        for slot, place in self._slots:
            slot.value = arguments[place]
        for pair, place in self._pairs:
            number = arguments[place]
            pair.real, pair.imag = number.real, number.imag
        check(self._executor, self._launch())


class LaunchPlan(Launching, Plan):
    """A plan of one launch; `scratch` is memory that the kernel is given the address of."""

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
    ) -> None:
        super().__init__(row, capture_safe=True)
        self._scratch = scratch
        self._prepare(executor, kernel, extents, filled, given)


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
        """Those of a matrix."""
        return cls(matrix.row_stride, matrix.col_stride, matrix.pointer.batch_stride // matrix.dtype.itemsize)


class KernelStep:
    """One launch over operands wherever a run has them, as a step of a plan.

    Of its arguments an OperandPointer or a View becomes an address, a Matrix an address and Strides, None the null
    pointer, a member of an enum an int, another int one of 64 bits and a float a double; ctypes objects are passed on.
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
        self._given = tuple(part for one in given for part in self._prepared(one))
        self._launch = launch_of(executor, kernel, grid, block, self._given)

    def _prepared(self, one: Any) -> tuple[Any, ...]:
        if isinstance(one, Matrix):
            return *self._prepared(one.pointer), Strides.of(one)
        if hasattr(one, "operand"):  # of cuFFT's views, too
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
        """Launch it at some addresses."""
        for slot, operand, offset in self._slots:
            slot.value = addresses[operand] + offset
        check(self._executor, self._launch())
