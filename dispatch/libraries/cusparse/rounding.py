"""Copies of matrices in another floating point type, each element rounded once, by a kernel of this library.

What cuSPARSE adds up in memory of 16 bits it rounds at each addition: plans have it add up in f32, and round the sums.
NVRTC compiles the kernel for the GPU at hand. This file knows no request.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.libraries.cusolver.copies import check
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype
    from dispatch.libraries.cusolver.matrix import Matrix

__all__ = ["NAME", "SOURCE", "THREADS", "Rounding", "options"]

NAME, THREADS = "round_matrix", 256
SOURCE = (
    NUMBERS
    + r"""
typedef long long Int;

extern "C" __global__ void round_matrix(
    const FROM* source, TO* target, Int rows, Int cols, Int from_row, Int from_col, Int to_row, Int to_col)
{
    const Int number = (Int)blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= rows * cols) return;
    const Int row = number / cols, col = number % cols;
    write(target[row * to_row + col * to_col], read(source[row * from_row + col * from_col]));
}
"""
)


def options(source: Dtype, target: Dtype) -> tuple[str, ...]:
    """NVRTC's options for elements of two dtypes, of which f64 goes with itself alone."""
    return "-std=c++17", f"-DFROM={NAMES[source]}", f"-DTO={NAMES[target]}"


class Rounding:
    """A copy of a matrix in another dtype, as a step of a plan; neighbouring threads have neighbours of the target."""

    __slots__ = ("_executor", "_given", "_launch", "_source", "_target")

    def __init__(self, executor: CudaExecutor, source: Matrix, target: Matrix) -> None:
        self._executor, self._source, self._target = executor, source.place, target.place
        if target.row < target.col:
            source, target = source.mT, target.mT
        numbers = (target.rows, target.cols, source.row, source.col, target.row, target.col)
        self._given: tuple[Any, ...] = (ctypes.c_void_p(), ctypes.c_void_p(), *map(ctypes.c_int64, numbers))
        function = loaded(SOURCE, NAME, options(source.dtype, target.dtype), executor.device)
        pointers = (ctypes.c_void_p * len(self._given))(*map(ctypes.addressof, self._given))
        extents = (-(-target.rows * target.cols // THREADS), 1, 1, THREADS, 1, 1)
        fixed = (ctypes.c_void_p(function), *extents, 0, executor.target, pointers, None)
        self._launch = partial(driver.cuLaunchKernel.unchecked, *fixed)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Copy at some addresses."""
        source, target, *_ = self._given
        source.value = addresses[self._source.operand] + self._source.offset
        target.value = addresses[self._target.operand] + self._target.offset
        check(self._executor, self._launch())
