"""Direct solves of matrices of several patterns by cuDSS: all in one call, and one by one if one of them fails.

As for a batch of one pattern (cudss_batched.py) cuDSS reports one status for all. So solutions are checked, too, and
if anything is wrong each system is solved by itself, with factors that depend on no other matrix.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from cudabind import driver
from dispatch.core.request import Plan
from dispatch.libraries.cublas.pointers import PointerArrays
from dispatch.libraries.cudss.factors import Factors, SolverSettings, SystemSpec
from dispatch.libraries.cudss.lists import ListFactors
from dispatch.libraries.cusolver.copies import Copy, CopyMode, check
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.nvrtc.kernel import loaded
from dispatch.ops.sparse.cudss_batched import NOT_A_SOLUTION, STATUS_BYTES, THREADS, UNSOLVED, options
from dispatch.ops.sparse.cudss_single import Run, kind_of
from dispatch.ops.sparse.list_rules import is_packed

if TYPE_CHECKING:
    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.sparse.direct_lists import BatchedSpsolveListRequest

__all__ = ["NAME", "SOURCE", "ListPlan"]

ALIGNMENT = 256
NAME = "look_at_each"
SOURCE = r"""
typedef long long Int;

// Of each system whether an element of x is NaN or infinite, 1, and whether one of b is, 2: a block for each.
extern "C" __global__ void look_at_each(
    const REAL* const* b, const REAL* const* x, const Int* counts, unsigned* found, Int systems)
{
    for (Int number = blockIdx.x; number < systems; number += gridDim.x) {
        unsigned seen = 0;
        for (Int i = threadIdx.x; i < counts[number]; i += blockDim.x) {
            const REAL solution = x[number][i], right = b[number][i];
            seen |= (solution - solution == 0 ? 0 : 1) | (right - right == 0 ? 0 : 2);
        }
        if (seen) atomicOr(found + number, seen);
    }
}
"""
MAX_BLOCKS = 1 << 16


class ListPlan(Plan):
    """Copies of right-hand sides whose columns are not dense, and the solve."""

    __slots__ = (
        "_copies", "_counts", "_executor", "_factors", "_flags", "_function", "_keeps", "_memory", "_settings",
        "_singles", "_specs",
    )  # fmt: skip

    def __init__(self, request: BatchedSpsolveListRequest, executor: CudaExecutor, row: Row) -> None:
        super().__init__(row, capture_safe=False)
        self._executor = executor
        self._keeps = all(form.pattern is not None for form in request.form)
        self._copies, self._memory = self._column_copies(request)
        self._specs = tuple(system_spec(request, number) for number in range(request.batch))
        self._settings = SolverSettings(refinements=request.refinements or 0)
        self._factors = ListFactors(executor, self._specs, 0, self._settings)
        self._singles: dict[int, Factors] = {}  # of one system each, created when the batch first fails
        parts = 1 + request.dtype.is_complex
        self._counts = PointerArrays(executor, request.batch, 1)  # of real numbers
        self._counts.enqueue([(one.n * one.nrhs * parts,) for one in self._specs])
        self._function = loaded(SOURCE, NAME, options(request.dtype.itemsize, parts=parts), executor.device)
        self._flags = executor.device.allocate(request.batch * STATUS_BYTES, executor.stream)

    def _column_copies(self, request: BatchedSpsolveListRequest) -> tuple[dict[int, tuple[Copy, int]], Any]:
        """For the index of each right-hand side that must be copied: the copy, and its offset in the plan's memory."""
        size, where, copies = request.dtype.itemsize, 0, {}
        for number in range(request.batch):
            layout = request.layout_of("b", number)
            if is_packed(layout):
                continue
            n, nrhs = layout.shape if len(layout.shape) > 1 else (*layout.shape, 1)
            strides = layout.strides if len(layout.shape) > 1 else (*layout.strides, 1)
            source = Matrix(OperandPointer(0), request.dtype, n, nrhs, *strides)
            target = Matrix(OperandPointer(1), request.dtype, n, nrhs, 1, n)
            copies[number] = Copy(self._executor, source, target, 1, CopyMode.ALL, conj=False), where
            where += -(-n * nrhs * size // ALIGNMENT) * ALIGNMENT
        return copies, self._executor.device.allocate(where, self._executor.stream) if copies else None

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        args: Any = arguments
        count = len(self._specs)
        values, rows, columns, right, x = (tuple(args[place * count : (place + 1) * count]) for place in range(5))
        info, stamp = args[5 * count :]
        b = list(right)
        for number, (copy, where) in self._copies.items():
            b[number] = self._memory.base + where
            copy.enqueue((right[number], b[number]))
        run = Run((rows, columns), values, tuple(b), x, None if stamp < 0 else stamp)
        factors = self._factors
        is_new = factors.factorize(*run, keeps=self._keeps)
        if not factors.info:
            factors.substitute()
            if is_new and self._find_unsolved().any():
                factors.mark_failed(UNSOLVED)
        if factors.info:
            self._solve_each(run, info)
        else:
            self._write_status(info, 0, count)

    def _solve_each(self, run: Run, info: Any) -> None:
        """Factorize and solve each system, and write its status; check its solution if cuDSS reports no error."""
        (rows, columns), values, b, x, _ = run
        statuses = []
        for number, one in enumerate(self._specs):
            if number not in self._singles:
                placeholder = self._executor.workspace.c_ptr.value or 0
                self._singles[number] = Factors(self._executor, one, placeholder, self._settings)
            single = self._singles[number]
            single.solve((rows[number], columns[number]), values[number], b[number], x[number], None, keeps=self._keeps)
            statuses.append(single.info)
        unsolved = self._find_unsolved()
        for number, status in enumerate(statuses):
            is_unsolved = not status and bool(unsolved[number])
            if is_unsolved:
                self._singles[number].mark_failed(UNSOLVED)
            self._write_status(info + number * STATUS_BYTES, UNSOLVED if is_unsolved else status)

    def _write_status(self, info: Any, status: int, count: int = 1) -> None:
        driver.cuMemsetD32Async(info, status & 0xFFFFFFFF, count, self._executor.target.value)

    def _find_unsolved(self) -> np.ndarray:
        """Which systems have NaN or infinite elements in the solution though b has none; waits for the result."""
        count, stream, at = len(self._specs), self._executor.target.value, self._flags.base
        flags = np.zeros(count, np.uint32)
        driver.cuMemsetD8Async(at, 0, flags.nbytes, stream)
        lists = (*self._factors.b_and_x, *self._counts.addresses)
        arguments = (*lists, ctypes.c_void_p(at), ctypes.c_int64(count))
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        function, grid = ctypes.c_void_p(self._function), (min(count, MAX_BLOCKS), 1, 1, THREADS, 1, 1)
        check(
            self._executor, driver.cuLaunchKernel.unchecked(function, *grid, 0, self._executor.target, pointers, None)
        )
        driver.cuMemcpyDtoHAsync(flags.ctypes.data, at, flags.nbytes, stream)
        driver.cuStreamSynchronize(stream)
        unsolved: np.ndarray = flags == NOT_A_SOLUTION
        return unsolved


def system_spec(request: BatchedSpsolveListRequest, number: int) -> SystemSpec:
    """The description of a system, whose right-hand sides and solution have contiguous columns."""
    n, b = request.form[number].shape[0], request.b[number]
    return SystemSpec(
        n=n,
        nnz=request.values[number].shape[0],
        nrhs=b.shape[1] if b.ndim > 1 else 1,
        ld=(n, n),
        offset_bytes=request.rows[number].dtype.itemsize,
        index_bytes=request.columns[number].dtype.itemsize,
        value_type=request.dtype.cuda,
        kind=kind_of(request.assume_a, request.dtype),
        view=0 if request.uplo is None else 1 + int(request.uplo),
        base=request.form[number].base,
    )
