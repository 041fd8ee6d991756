"""Launches of this library's own kernels, which plans of several families make: at the addresses and numbers of a run.

A kernel takes what each run fills in, and behind that what is the same in all of them. Beside `kernel.py`, where those
of a user's own are launched, here are numbers as kernels take them and memory that is 0 as a plan begins.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.keys import C64, C128, F64, U8, Dtype
from dispatch.libraries.nvrtc.kernel import loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["DoublePair", "LaunchPlan", "LaunchStep", "SinglePair", "cleared", "number_of"]


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
        kernel: tuple[str, str, tuple[str, ...]],
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
        taken = (*(slot for slot, _ in filled), *given)
        pointers = (ctypes.c_void_p * len(taken))(*map(ctypes.addressof, taken))
        function, (blocks, threads) = ctypes.c_void_p(loaded(*kernel, executor.device)), extents
        fixed = (function, blocks, 1, 1, threads, 1, 1, 0, executor.target, pointers, None)
        launch = partial(driver.cuLaunchKernel.unchecked, *fixed)
        found = executor, taken, launch, pairs, slots
        self._executor, self._given, self._launch, self._pairs, self._slots = found  # type: ignore[misc]  # its classes' slots

    def enqueue(self, arguments: Sequence[Any]) -> None:
        """Launch it for some addresses and numbers."""
        for slot, place in self._slots:
            slot.value = arguments[place]
        for pair, place in self._pairs:
            number = arguments[place]
            pair.real, pair.imag = number.real, number.imag
        status = self._launch()
        if status:
            self._executor.stream.done()  # raises DeviceFault where it is the device that is lost
            raise driver.error("cuLaunchKernel", status)


class LaunchPlan(Launching, Plan):
    """A plan of one launch; `scratch` is memory that the kernel is given the address of."""

    __slots__ = (*SLOTS, "_scratch")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        kernel: tuple[str, str, tuple[str, ...]],
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
        kernel: tuple[str, str, tuple[str, ...]],
        extents: tuple[int, int],
        filled: Sequence[tuple[Any, int | None]],
        given: Sequence[Any],
    ) -> None:
        self._prepare(executor, kernel, extents, filled, given)
