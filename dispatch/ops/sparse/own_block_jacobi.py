"""Plans of the inverses of a matrix's diagonal blocks: a launch of the kernel of block_jacobi_kernels.py."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.libraries.nvrtc.kernel import Kernel, KernelPlan, Launch, loaded
from dispatch.ops.sparse.block_jacobi_kernels import NAME, SOURCE
from dispatch.ops.sparse.form import SparseFormat
from dispatch.ops.sparse.wide_numbers import number_options

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["BlockParameters", "kernel_of", "plan"]

WARP = 32
THREADS = 128  # per thread block; the largest matrix blocks use 32, because each needs 17 KB of shared memory
TYPES = {4: "int", 8: "long long"}
STATUS_BYTES = 4


class BlockParameters(ctypes.Structure):
    """The structure `Blocks` of block_jacobi_kernels.py, which the kernel takes after the addresses."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "count", "elements", "base")),
        *((name, ctypes.c_int64) for name in ("block_step", "row_step", "column_step")),
        *((name, ctypes.c_int) for name in ("size", "high", "wide")),
    )


class BlockJacobiPlan(KernelPlan):
    """One kernel, which records a block without an inverse in a status that is set to 0 first."""

    __slots__ = ()

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        info: Any = arguments[-1]  # an address
        driver.cuMemsetD8Async(info, 0, STATUS_BYTES, self._executor.target.value)
        super().enqueue(arguments)


def plan(request: Any, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of a request: a status of 0, and one launch."""
    kernel = kernel_of(request)
    function = loaded(kernel.source, kernel.function, kernel.options, executor.device)
    operands = len(request.reads) + len(request.writes)
    return BlockJacobiPlan(executor, row, function, kernel.launch(request), operands)


def lanes_of(request: Any) -> int:
    """The number of threads for one block of the matrix: its rows, rounded up to a power of 2."""
    return 1 << (int(request.block_size) - 1).bit_length()


def kernel_of(request: Any) -> Kernel:
    """The kernel for the dtype, format and index widths of a request, and for the threads of its blocks."""
    lanes = lanes_of(request)
    words = {
        **number_options(request.values.dtype),
        "FORMAT": str(int(SparseFormat(request.form.format))),
        "ROW": TYPES[request.rows.dtype.itemsize],
        "COLUMN": TYPES[request.columns.dtype.itemsize],
        "LANES": str(lanes),
        "THREADS": str(threads_of(lanes)),
        "ABSOLUTE": str(int(request.absolute)),
    }
    return Kernel(SOURCE, NAME, launch, ("-std=c++17", *(f"-D{name}={word}" for name, word in words.items())))


def threads_of(lanes: int) -> int:
    """The number of threads of a thread block."""
    return WARP if lanes == WARP else THREADS


def launch(request: Any) -> Launch:
    """So many threads for each block of the matrix."""
    form, lanes = request.form, lanes_of(request)
    threads = threads_of(lanes)
    block_step, row_step, column_step = request.layout_of("out").strides
    high, wide = form.block
    parameters = BlockParameters(
        n=form.shape[0], count=request.blocks, elements=request.values.shape[0], base=form.base,
        block_step=block_step, row_step=row_step, column_step=column_step,
        size=int(request.block_size), high=high, wide=wide,
    )  # fmt: skip
    return Launch((-(-request.blocks * lanes // threads),), (threads,), (parameters,))
