"""Copies of matrices to another floating-point type, each element rounded once, by a kernel of this library.

cuSPARSE rounds at each addition if sums are stored in 16 bits: plans let it add up in f32, and round the sums. NVRTC
compiles the kernel for the GPU in use. This file depends on no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dispatch.libraries.nvrtc.launching import KernelStep
from dispatch.libraries.nvrtc.number_types import NAMES, NUMBERS

if TYPE_CHECKING:
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
    """NVRTC's options for the dtypes of source and target; f64 is converted only to f64."""
    return "-std=c++17", f"-DFROM={NAMES[source]}", f"-DTO={NAMES[target]}"


class Rounding(KernelStep):
    """A copy of a matrix in another dtype, as a step of a plan; neighbouring threads write neighbouring elements."""

    __slots__ = ()

    def __init__(self, executor: CudaExecutor, source: Matrix, target: Matrix) -> None:
        if target.row_stride < target.col_stride:
            source, target = source.mT, target.mT
        numbers = (target.rows, target.cols, source.row_stride, source.col_stride, target.row_stride, target.col_stride)
        kernel = (SOURCE, NAME, options(source.dtype, target.dtype))
        grid = (-(-target.rows * target.cols // THREADS),)
        super().__init__(executor, kernel, grid, (THREADS,), (source.pointer, target.pointer, *numbers))
