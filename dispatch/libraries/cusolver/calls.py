"""Plans that are sequences of cuSOLVER calls with copies between them; each run only fills in the addresses.

The `cusolver` modules of the ops build them with `Steps`, which queries workspace sizes once. Workspace on the device
belongs to the executor, and its plans share it; workspace on the host is NumPy memory that the plan owns.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cudabind import driver
from cudabind.sys import cusolverDn as dn
from dispatch.core.request import Plan
from dispatch.keys import C64, C128, F32, F64
from dispatch.libraries.cublas.calls import CallStep, Constant, Operand, Routine
from dispatch.libraries.cusolver.copies import Copy, CopyMode, FillNanWhere, FlagNonfinite, PointerList
from dispatch.libraries.cusolver.handle import handle_of
from dispatch.libraries.cusolver.matrix import Matrix, OperandPointer
from dispatch.libraries.cusolver.reductions import SOURCE, THREADS, BatchKernelStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["FLAG_BYTES", "LETTERS", "HostNumbers", "SolverPlan", "Steps", "cuda_type", "real_of"]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
REALS = {F32: F32, F64: F64, C64: F32, C128: F64}
ALIGNMENT = 256  # bytes
FLAG_BYTES = 4  # bytes of a flag or a status
HOST_MEMORY = -1  # the operand of host pointers: the offset is the address, because the last address of a plan is 0


def real_of(dtype: Dtype) -> Dtype:
    """The dtype of eigenvalues and singular values for matrices of a dtype."""
    return REALS[dtype]


def cuda_type(dtype: Dtype) -> dn.cudaDataType_t:
    """A dtype as the enum of the 64-bit interface."""
    return dn.cudaDataType_t(dtype.cuda)


class PlanStep(Protocol):
    """One step of a plan."""

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Enqueue the step with these addresses."""


class HostNumbers:
    """One number per matrix in host memory, written by a routine before it returns."""

    __slots__ = ("array", "pointer")

    def __init__(self, count: int, kind: type[np.generic] = np.int64) -> None:
        self.array: Any = np.zeros(count, kind)
        self.pointer = OperandPointer(HOST_MEMORY, self.array.ctypes.data, self.array.itemsize)


class Call:
    """A library call for each matrix of a batch; pointers among its arguments become addresses."""

    __slots__ = ("_count", "_executor", "_function", "_handle", "_kept_alive", "_ready", "_slots")

    def __init__(
        self, executor: CudaExecutor, handle: Any, name: str, arguments: Sequence[Any], count: int, library: Any = None
    ) -> None:
        self._executor, self._handle, self._count = executor, handle, count
        self._function: Any = getattr(library or dn, name)
        self._kept_alive = tuple(arguments)
        slots: list[tuple[ctypes.c_void_p, OperandPointer]] = []
        ready: list[Any] = []
        for argument in arguments:
            if isinstance(argument, (OperandPointer, HostNumbers)):
                slot = ctypes.c_void_p()
                slots.append((slot, argument if isinstance(argument, OperandPointer) else argument.pointer))
                ready.append(slot)
            elif isinstance(argument, np.ndarray):
                ready.append(ctypes.c_void_p(argument.ctypes.data) if argument.size else None)
            else:
                ready.append(getattr(argument, "handle", argument))
        self._slots, self._ready = slots, tuple(ready)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Call the routine for each matrix."""
        for number in range(self._count):
            for slot, pointer in self._slots:
                slot.value = addresses[pointer.operand] + pointer.offset + number * pointer.batch_stride
            status = self._function.unchecked(self._handle.follow(), *self._ready)
            if status:
                self._executor.stream.done()  # raises DeviceFault if the device is lost
                raise self._function.error(status)


class FillZeros:
    """Set a number of bytes to 0."""

    __slots__ = ("_executor", "_nbytes", "_pointer")

    def __init__(self, executor: CudaExecutor, pointer: OperandPointer, nbytes: int) -> None:
        self._executor, self._pointer, self._nbytes = executor, pointer, nbytes

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Enqueue the memset."""
        at = addresses[self._pointer.operand] + self._pointer.offset
        driver.cuMemsetD8Async(at, 0, self._nbytes, self._executor.target.value)


class SynchronizeStream:
    """The host waits for the stream, before a routine that reads device memory without using the stream."""

    __slots__ = ("_executor",)

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Wait; no address is needed."""
        del addresses
        driver.cuStreamSynchronize(self._executor.target.value)


class ConditionalSteps:
    """Steps that run only if a routine has written a given number, or any number but 0, into host memory."""

    __slots__ = ("_number", "_numbers", "_steps")

    def __init__(self, numbers: HostNumbers, number: int | None, steps: Sequence[PlanStep]) -> None:
        self._numbers, self._number, self._steps = numbers, number, steps

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Run the steps if such a number is there now; the routine has returned, and has already waited for the GPU."""
        matches = self._numbers.array if self._number is None else self._numbers.array == self._number
        if matches.any():
            for step in self._steps:
                step.enqueue(addresses)


class UploadNumbers:
    """Copy numbers from host memory, written by routines, to the device."""

    __slots__ = ("_executor", "_numbers", "_pointer")

    def __init__(self, executor: CudaExecutor, numbers: HostNumbers, pointer: OperandPointer) -> None:
        self._executor, self._numbers, self._pointer = executor, numbers, pointer

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Enqueue the copy; pageable memory is read before the call returns."""
        at, array = addresses[self._pointer.operand] + self._pointer.offset, self._numbers.array
        driver.cuMemcpyHtoDAsync(at, array.ctypes.data, array.nbytes, self._executor.target.value)


class SolverPlan(Plan):
    """A sequence of steps."""

    __slots__ = ("_executor", "_kept_alive", "_steps")

    def __init__(
        self, executor: CudaExecutor, row: Row, steps: Sequence[PlanStep], keep: Sequence[Any], *, capture_safe: bool
    ) -> None:
        super().__init__(row, capture_safe=capture_safe)
        self._executor = executor
        self._steps, self._kept_alive = tuple(steps), tuple(keep)  # scratch and workspace

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for storage in self._kept_alive:
            if storage is not None and storage.owner is not self._executor.stream:
                # Created on another stream while the caller captured the executor's stream; that stream was
                # synchronized since.
                storage.owner = storage.writer = self._executor.stream
        addresses = (*arguments, *(0 if storage is None else storage.base for storage in self._kept_alive), 0)
        for step in self._steps:
            step.enqueue(addresses)


class IdlePlan(SolverPlan):
    """Steps without a routine, as for a matrix without elements: a CUDA graph is not worthwhile for them."""

    __slots__ = ()
    is_bare = True


class Steps:
    """Builds a plan: scratch memory, copies and calls over the matrices of a batch.

    `operands` is the number of addresses of a request; the addresses of scratch memory and workspace follow them.
    """

    def __init__(self, executor: CudaExecutor, row: Row, operands: int, batch: int) -> None:
        self.executor, self.row, self.batch = executor, row, batch
        self.handle = handle_of(executor)
        self._scratch, self._work = operands, operands + 1
        self._scratch_bytes = self._work_bytes = 0
        self._steps: list[PlanStep] = []

    # -- memory -------------------------------------------------------------------------------------------------------
    def scratch(self, nbytes: int) -> OperandPointer:
        """Scratch memory of `nbytes` for each matrix of the batch, contiguous."""
        pointer = OperandPointer(self._scratch, self._scratch_bytes, nbytes)
        self._scratch_bytes += -(-nbytes * self.batch // ALIGNMENT) * ALIGNMENT
        return pointer

    def scratch_matrix(self, dtype: Dtype, rows: int, cols: int) -> Matrix:
        """Scratch memory for a dense column-major matrix."""
        return Matrix(self.scratch(rows * cols * dtype.itemsize), dtype, rows, cols, 1, max(1, rows))

    def ignored_info(self) -> OperandPointer:
        """Memory for a status that is not read: it only reports whether the arguments are valid."""
        return self.scratch(4)._replace(batch_stride=0)

    def work(self, nbytes: int) -> OperandPointer:
        """Workspace on the device, shared by all calls."""
        self._work_bytes = max(self._work_bytes, nbytes)
        return OperandPointer(self._work)

    # -- steps --------------------------------------------------------------------------------------------------------
    def copy(self, source: Matrix, target: Matrix, mode: CopyMode = CopyMode.ALL, *, conj: bool = False) -> None:
        """Copy a matrix into another of the same extents."""
        if source.rows and source.cols and self.batch:
            self._steps.append(Copy(self.executor, source, target, self.batch, mode, conj=conj))

    def identity(self, target: Matrix) -> None:
        """Set a matrix to the identity."""
        if target.rows and target.cols and self.batch:
            self._steps.append(Copy(self.executor, target, target, self.batch, CopyMode.IDENTITY, conj=False))

    def fill_nan_where(self, info: OperandPointer, *results: Matrix) -> None:
        """Set the results of matrices whose status is not 0 to NaN."""
        for result in results:
            if result.rows and result.cols and self.batch:
                self._steps.append(FillNanWhere(self.executor, info, result, self.batch))

    def flag_nonfinite(self, *matrices: Matrix) -> OperandPointer:
        """A flag for each matrix of the batch: 1 if it, or the matching matrix of another argument, is not finite."""
        flags = self.scratch(FLAG_BYTES)
        self.fill_zeros(flags, FLAG_BYTES * self.batch)
        for matrix in matrices:
            if matrix.rows and matrix.cols and self.batch:
                self._steps.append(FlagNonfinite(self.executor, matrix, flags, self.batch))
        return flags

    def wait(self) -> None:
        """Make the host wait for the previous steps."""
        self._steps.append(SynchronizeStream(self.executor))

    @contextmanager
    def only_where(self, numbers: HostNumbers, number: int | None = None) -> Iterator[None]:
        """Steps that are added in this context run only if one of the numbers is `number` by then, or not 0 if None."""
        before, self._steps = self._steps, []
        try:
            yield
        finally:
            before.append(ConditionalSteps(numbers, number, self._steps))
            self._steps = before

    def append(self, step: PlanStep) -> None:
        """Add a step that the caller has created."""
        self._steps.append(step)

    def upload(self, numbers: HostNumbers, pointer: OperandPointer) -> None:
        """Copy numbers from host memory, written by routines, to the device."""
        self._steps.append(UploadNumbers(self.executor, numbers, pointer))

    def fill_zeros(self, pointer: OperandPointer, nbytes: int) -> None:
        """Set bytes to 0."""
        if nbytes:
            self._steps.append(FillZeros(self.executor, pointer, nbytes))

    def pointers(self, matrix: Matrix) -> OperandPointer:
        """The array of the addresses of a batch."""
        pointer = self.scratch(8)._replace(batch_stride=0)
        self._steps.append(PointerList(self.executor, matrix, pointer, self.batch))
        return pointer

    def launch(
        self, name: str, dtype: Dtype, elements: int, *arguments: Any, per_block: int = THREADS, source: str = SOURCE
    ) -> None:
        """Launch a kernel over the batch, with a block for each `per_block` elements of a matrix."""
        if self.batch:
            blocks = max(1, -(-elements // per_block))
            self._steps.append(BatchKernelStep(self.executor, name, dtype, self.batch, blocks, arguments, source))

    def blas(self, name: str, dtype: Dtype, *arguments: Any) -> None:
        """Call a cuBLAS routine once; pointers become addresses, and floats become numbers of the dtype."""
        values = tuple(
            Operand(one.operand, one.offset)
            if isinstance(one, OperandPointer)
            else Constant(one, dtype)
            if isinstance(one, float)
            else one
            for one in arguments
        )
        step: Any = CallStep(self.executor, Routine(name, dtype, values))  # Any: it accepts any arguments of a run
        self._steps.append(step)

    def call(self, name: str, *arguments: Any, count: int | None = None) -> None:
        """Call a routine for each matrix, or `count` times."""
        times = self.batch if count is None else count
        self._steps.append(Call(self.executor, self.handle, name, arguments, times))

    def call_params(self, name: str, *arguments: Any) -> None:
        """Call a routine of the 64-bit interface that needs no workspace."""
        self.call(name, self.handle.params, *arguments)

    def call_x(
        self,
        name: str,
        *arguments: Any,
        info: OperandPointer,
        trailing: Sequence[Any] = (),
        not_in_query: OperandPointer | None = None,
        count: int | None = None,
        params: bool = True,
    ) -> None:
        """Call a 64-bit routine whose workspace sizes are queried now; `trailing` arguments follow its info.

        The query omits the argument `not_in_query`. Few routines have no `params`.
        """
        first = (self.handle.params,) if params else ()
        device, host = ctypes.c_size_t(), ctypes.c_size_t()
        query = [self._query_argument(argument) for argument in arguments if argument is not not_in_query]
        batched = trailing if name.endswith("Batched") else ()
        sizes = (ctypes.byref(device), ctypes.byref(host))
        ask = getattr(dn, f"{name}_bufferSize")
        ask(self.handle.follow(), *(one.handle for one in first), *query, *sizes, *batched)
        memory = np.empty(host.value, np.uint8)
        work = (self.work(device.value), device.value, memory, host.value)
        self.call(name, *first, *arguments, *work, info, *trailing, count=count)

    def call_with_work(
        self,
        name: str,
        dtype: Dtype,
        *arguments: Any,
        info: OperandPointer,
        trailing: Sequence[Any] = (),
        count: int | None = None,
        query_arguments: Sequence[Any] | None = None,
    ) -> None:
        """Call a routine of the 32-bit interface; its workspace, counted in elements, comes before its info.

        The query has the same arguments, or `query_arguments`, and those of `trailing` that are not None.
        """
        size = ctypes.c_int32()
        ask = getattr(dn, f"{name}_bufferSize")
        settings = tuple(getattr(one, "handle", one) for one in trailing if one is not None)
        ask(
            self.handle.follow(),
            *map(self._query_argument, arguments if query_arguments is None else query_arguments),
            ctypes.byref(size),
            *settings,
        )
        work = self.work(size.value * dtype.itemsize)
        self.call(name, *arguments, work, size.value, info, *trailing, count=count)

    def call_refined(
        self, name: str, params: Any, infos: Any, extents: Sequence[int], *arguments: Any, trailing: Sequence[Any]
    ) -> None:
        """Call an iterative refinement routine; its workspace size, in bytes, depends on its settings and extents."""
        size = ctypes.c_size_t()
        ask = getattr(dn, f"{name}_bufferSize")
        ask(self.handle.follow(), params.handle, *extents, ctypes.byref(size))
        self.call(name, params, infos, *extents, *arguments, self.work(size.value), size.value, *trailing)

    def _query_argument(self, argument: Any) -> Any:
        """An argument for the workspace query: pointers become some device memory."""
        if isinstance(argument, OperandPointer):
            return self.executor.workspace.c_ptr
        if isinstance(argument, HostNumbers):
            return ctypes.c_void_p(argument.array.ctypes.data)
        if isinstance(argument, np.ndarray):
            return ctypes.c_void_p(argument.ctypes.data)
        return getattr(argument, "handle", argument)

    def plan(self, *, capture_safe: bool, idle: bool = False) -> SolverPlan:
        """The plan of all these steps; `idle` if none of them is a routine."""
        keep = (
            self.handle.memory(self.executor, "scratch", self._scratch_bytes),
            self.handle.memory(self.executor, "work", self._work_bytes),
        )
        kind = IdlePlan if idle else SolverPlan
        return kind(self.executor, self.row, self._steps, keep, capture_safe=capture_safe)
