"""Direct solves of a batch by cuDSS: all matrices at once, and one after another if one cannot be factorized.

cuDSS reports one status for all matrices of a batch, and computes scaling and ordering for all from the first one: if
that was 0 all solutions were NaN, and the status did not report it (1.0.0, H200). So solutions are checked, too, and if
anything is wrong each matrix is solved by itself, with factors that depend on no other matrix.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.libraries.cusolver.copies import check
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.sparse.cudss_single import CudssPlan, Run

if TYPE_CHECKING:
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cudss.factors import Factors
    from dispatch.ops.sparse.direct import BatchedSpsolveRequest

__all__ = ["NAME", "SOURCE", "THREADS", "UNSOLVED", "BatchedPlan", "options"]

STATUS_BYTES = 4
NAME, THREADS = "look_at_solutions", 256
NOT_A_SOLUTION = 1  # written by the kernel if a solution is not finite, but its right-hand side is
UNSOLVED = -1  # the status of such a solution if cuDSS has not reported one; below 0 as for replaced pivots
SOURCE = r"""
typedef long long Int;

// Of each matrix whether an element of x is NaN or infinite, 1, and whether one of b is, 2.
extern "C" __global__ void look_at_solutions(const REAL* b, const REAL* x, unsigned* found, Int each, Int count)
{
    for (Int at = (Int)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (Int)gridDim.x * blockDim.x) {
        const unsigned seen = (x[at] - x[at] == 0 ? 0 : 1) | (b[at] - b[at] == 0 ? 0 : 2);
        if (seen) atomicOr(found + at / each, seen);
    }
}
"""
MAX_BLOCKS = 1056  # 8 for each of 132 multiprocessors; threads loop over the rest


class BatchedPlan(CudssPlan):
    """A uniform batch: one analysis, and the factors of all matrices."""

    __slots__ = ("_flags", "_function", "_numbers", "_single", "_steps")

    def __init__(self, request: BatchedSpsolveRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(request, executor, row)
        self._single: Factors | None = None  # of one matrix, created when a batch first fails
        dtype, size = request.values.dtype, self._spec.n * self._spec.nrhs
        self._steps = self._spec.nnz * dtype.itemsize, size * dtype.itemsize
        self._numbers = size * (1 + dtype.is_complex)  # real numbers per matrix
        self._function = loaded(SOURCE, NAME, options(dtype.itemsize, parts=1 + dtype.is_complex), executor.device)
        self._flags = executor.device.allocate(self._batch * STATUS_BYTES, executor.stream)

    def solve(self, run: Run, info: Any) -> None:
        factors = self._factors
        is_new = factors.factorize(*run, keeps=self._keeps)
        if not factors.info:
            factors.substitute()
            if is_new and self._find_unsolved(run.b, run.x, self._batch).any():
                factors.mark_failed(UNSOLVED)
        if factors.info:
            self._solve_each(run, info)
        else:
            self.write_status(info, 0, self._batch)

    def _solve_each(self, run: Run, info: Any) -> None:
        """Factorize and solve each matrix, and write its status."""
        if self._single is None:
            self._single = self.factors(self._spec, self._settings._replace(batch=1))
        single, (across, along) = self._single, self._steps
        for number in range(self._batch):
            values, b, x = run.values + number * across, run.b + number * along, run.x + number * along
            single.solve(run.pattern, values, b, x, None, keeps=self._keeps or number > 0)
            if not single.info and self._find_unsolved(b, x, 1).any():
                single.mark_failed(UNSOLVED)
            self.write_status(info + number * STATUS_BYTES, single.info)

    def _find_unsolved(self, b: int, x: int, count: int) -> np.ndarray:
        """Which of so many solutions have NaN or infinite elements though b has none; waits for the result."""
        flags, stream, at = np.zeros(count, np.uint32), self._executor.target.value, self._flags.base
        numbers = count * self._numbers
        driver.cuMemsetD8Async(at, 0, flags.nbytes, stream)
        arguments = (*map(ctypes.c_void_p, (b, x, at)), ctypes.c_int64(self._numbers), ctypes.c_int64(numbers))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        blocks = min(-(-numbers // THREADS), MAX_BLOCKS)
        function, grid = ctypes.c_void_p(self._function), (blocks, 1, 1, THREADS, 1, 1)
        check(
            self._executor, driver.cuLaunchKernel.unchecked(function, *grid, 0, self._executor.target, pointers, None)
        )
        driver.cuMemcpyDtoHAsync(flags.ctypes.data, at, flags.nbytes, stream)
        driver.cuStreamSynchronize(stream)
        unsolved: np.ndarray = flags == NOT_A_SOLUTION
        return unsolved


def options(itemsize: int, *, parts: int) -> tuple[str, ...]:
    """NVRTC's options for elements of so many bytes, of one or two parts."""
    return "-std=c++17", f"-DREAL={'double' if itemsize // parts == 8 else 'float'}"
