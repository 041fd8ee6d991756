"""Plans that are several calls of cuSOLVER one after another, with copies between them: all is ready but the addresses.

The `cusolver` modules of the ops build them by `Steps`, which asks for workspace sizes once; device workspace is the
executor's, shared by its plans, workspace on the host is NumPy memory that the plan keeps.
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
from dispatch.libraries.cusolver.copies import Copy, FlagNonfinite, Keep, PointerList, Spoil
from dispatch.libraries.cusolver.handle import handle_of
from dispatch.libraries.cusolver.matrix import Matrix, Place
from dispatch.libraries.cusolver.reductions import SOURCE, THREADS, Launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dispatch.core.request import Argument
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["FLAG", "LETTERS", "HostNumbers", "SolverPlan", "Steps", "cuda_type", "real_of"]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
REALS = {F32: F32, F64: F64, C64: F32, C128: F64}
ALIGNMENT = 256  # bytes
FLAG = 4  # bytes, of a status, too
HOST = -1  # the operand of places in the host's memory, whose offset is an address: the last of a plan's addresses is 0


def real_of(dtype: Dtype) -> Dtype:
    """The dtype of eigenvalues and singular values of a matrix of a dtype."""
    return REALS[dtype]


def cuda_type(dtype: Dtype) -> dn.cudaDataType_t:
    """A dtype as the 64-bit interface is told it."""
    return dn.cudaDataType_t(dtype.cuda)


class Step(Protocol):
    """A part of a plan."""

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Enqueue it, for these addresses."""


class HostNumbers:
    """A number for each matrix, in the host's memory, where a routine puts it before it returns."""

    __slots__ = ("array", "place")

    def __init__(self, count: int, kind: type[np.generic] = np.int64) -> None:
        self.array: Any = np.zeros(count, kind)
        self.place = Place(HOST, self.array.ctypes.data, self.array.itemsize)


class Call:
    """A call of a library for each matrix of a batch; places among its arguments become addresses."""

    __slots__ = ("_count", "_executor", "_function", "_handle", "_keep", "_ready", "_slots")

    def __init__(
        self, executor: CudaExecutor, handle: Any, name: str, arguments: Sequence[Any], count: int, library: Any = None
    ) -> None:
        self._executor, self._handle, self._count = executor, handle, count
        self._function: Any = getattr(library or dn, name)
        self._keep = tuple(arguments)
        slots: list[tuple[ctypes.c_void_p, Place]] = []
        ready: list[Any] = []
        for argument in arguments:
            if isinstance(argument, (Place, HostNumbers)):
                slot = ctypes.c_void_p()
                slots.append((slot, argument if isinstance(argument, Place) else argument.place))
                ready.append(slot)
            elif isinstance(argument, np.ndarray):
                ready.append(ctypes.c_void_p(argument.ctypes.data) if argument.size else None)
            else:
                ready.append(getattr(argument, "handle", argument))
        self._slots, self._ready = slots, tuple(ready)

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Call it for each matrix."""
        for number in range(self._count):
            for slot, place in self._slots:
                slot.value = addresses[place.operand] + place.offset + number * place.step
            status = self._function.unchecked(self._handle.follow(), *self._ready)
            if status:
                self._executor.stream.done()  # raises DeviceFault where it is the device that is lost
                raise self._function.error(status)


class Zeros:
    """So many bytes at a place become 0."""

    __slots__ = ("_executor", "_nbytes", "_place")

    def __init__(self, executor: CudaExecutor, place: Place, nbytes: int) -> None:
        self._executor, self._place, self._nbytes = executor, place, nbytes

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Set them."""
        at = addresses[self._place.operand] + self._place.offset
        driver.cuMemsetD8Async(at, 0, self._nbytes, self._executor.target.value)


class Wait:
    """The host waits for what is enqueued, before a routine that reads the device's memory beside the stream."""

    __slots__ = ("_executor",)

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Wait; it needs no address."""
        del addresses
        driver.cuStreamSynchronize(self._executor.target.value)


class Where:
    """Steps that are taken only where a routine has put one number, or any but 0, into the host's memory."""

    __slots__ = ("_number", "_numbers", "_steps")

    def __init__(self, numbers: HostNumbers, number: int | None, steps: Sequence[Step]) -> None:
        self._numbers, self._number, self._steps = numbers, number, steps

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Ask the number that is there now; the routine has returned, and was waited for by itself."""
        found = self._numbers.array if self._number is None else self._numbers.array == self._number
        if found.any():
            for step in self._steps:
                step.enqueue(addresses)


class Upload:
    """Numbers that routines have put into the host's memory are copied to a place."""

    __slots__ = ("_executor", "_numbers", "_place")

    def __init__(self, executor: CudaExecutor, numbers: HostNumbers, place: Place) -> None:
        self._executor, self._numbers, self._place = executor, numbers, place

    def enqueue(self, addresses: Sequence[Any]) -> None:
        """Copy them; memory that is not page-locked is read before the call returns."""
        at, array = addresses[self._place.operand] + self._place.offset, self._numbers.array
        driver.cuMemcpyHtoDAsync(at, array.ctypes.data, array.nbytes, self._executor.target.value)


class SolverPlan(Plan):
    """Steps one after another."""

    __slots__ = ("_executor", "_keep", "_steps")

    def __init__(
        self, executor: CudaExecutor, row: Row, steps: Sequence[Step], keep: Sequence[Any], *, capture_safe: bool
    ) -> None:
        super().__init__(row, capture_safe=capture_safe)
        self._executor = executor
        self._steps, self._keep = tuple(steps), tuple(keep)  # scratch and workspace

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for storage in self._keep:
            if storage is not None and storage.owner is not self._executor.stream:
                # Made while the caller captured the executor's stream, on another one, which was waited for since.
                storage.owner = storage.writer = self._executor.stream
        addresses = (*arguments, *(0 if storage is None else storage.base for storage in self._keep), 0)
        for step in self._steps:
            step.enqueue(addresses)


class IdlePlan(SolverPlan):
    """Steps that no routine is among, as of a matrix without elements: they are not worth a graph of ours."""

    __slots__ = ()
    is_bare = True


class Steps:
    """What a plan is built with: scratch memory, copies and calls over the matrices of a batch.

    `operands` is how many addresses a request gives; scratch memory and workspace stand behind them.
    """

    def __init__(self, executor: CudaExecutor, row: Row, operands: int, batch: int) -> None:
        self.executor, self.row, self.batch = executor, row, batch
        self.handle = handle_of(executor)
        self._scratch, self._work = operands, operands + 1
        self._scratch_bytes = self._work_bytes = 0
        self._steps: list[Step] = []

    # -- memory -------------------------------------------------------------------------------------------------------
    def scratch(self, nbytes: int) -> Place:
        """So many bytes for each matrix of the batch, one behind another."""
        place = Place(self._scratch, self._scratch_bytes, nbytes)
        self._scratch_bytes += -(-nbytes * self.batch // ALIGNMENT) * ALIGNMENT
        return place

    def scratch_matrix(self, dtype: Dtype, rows: int, cols: int) -> Matrix:
        """Memory for a matrix, columns one behind another."""
        return Matrix(self.scratch(rows * cols * dtype.itemsize), dtype, rows, cols, 1, max(1, rows))

    def ignored_info(self) -> Place:
        """Where a routine may say that its arguments are sound, which nobody reads."""
        return self.scratch(4)._replace(step=0)

    def work(self, nbytes: int) -> Place:
        """Workspace on the device, which all calls share."""
        self._work_bytes = max(self._work_bytes, nbytes)
        return Place(self._work)

    # -- steps --------------------------------------------------------------------------------------------------------
    def copy(self, source: Matrix, target: Matrix, keep: Keep = Keep.ALL, *, conj: bool = False) -> None:
        """Copy a matrix into another of its extents."""
        if source.rows and source.cols and self.batch:
            self._steps.append(Copy(self.executor, source, target, self.batch, keep, conj=conj))

    def identity(self, target: Matrix) -> None:
        """Ones on the diagonal, and zeros beside it."""
        if target.rows and target.cols and self.batch:
            self._steps.append(Copy(self.executor, target, target, self.batch, Keep.ONES, conj=False))

    def spoil(self, info: Place, *results: Matrix) -> None:
        """Make NaN of the results of matrices whose status is not 0."""
        for result in results:
            if result.rows and result.cols and self.batch:
                self._steps.append(Spoil(self.executor, info, result, self.batch))

    def flag_nonfinite(self, *matrices: Matrix) -> Place:
        """A flag for each matrix of the batch: 1 where it, or that of another batch, has NaN or infinities, else 0."""
        flags = self.scratch(FLAG)
        self.zeros(flags, FLAG * self.batch)
        for matrix in matrices:
            if matrix.rows and matrix.cols and self.batch:
                self._steps.append(FlagNonfinite(self.executor, matrix, flags, self.batch))
        return flags

    def wait(self) -> None:
        """Have the host wait for the steps before."""
        self._steps.append(Wait(self.executor))

    @contextmanager
    def where(self, numbers: HostNumbers, number: int | None = None) -> Iterator[None]:
        """Steps that are added within are taken only where one of these is `number` by then, or any but 0."""
        before, self._steps = self._steps, []
        try:
            yield
        finally:
            before.append(Where(numbers, number, self._steps))
            self._steps = before

    def append(self, step: Step) -> None:
        """Add a step of the caller's."""
        self._steps.append(step)

    def upload(self, numbers: HostNumbers, place: Place) -> None:
        """Copy what routines have put into the host's memory."""
        self._steps.append(Upload(self.executor, numbers, place))

    def zeros(self, place: Place, nbytes: int) -> None:
        """Set bytes to 0."""
        if nbytes:
            self._steps.append(Zeros(self.executor, place, nbytes))

    def pointers(self, matrix: Matrix) -> Place:
        """The list of the addresses of a batch."""
        place = self.scratch(8)._replace(step=0)
        self._steps.append(PointerList(self.executor, matrix, place, self.batch))
        return place

    def launch(
        self, name: str, dtype: Dtype, elements: int, *arguments: Any, share: int = THREADS, source: str = SOURCE
    ) -> None:
        """Launch a kernel over the batch, with a block for so many elements of a matrix as are its share."""
        if self.batch:
            blocks = max(1, -(-elements // share))
            self._steps.append(Launch(self.executor, name, dtype, self.batch, blocks, arguments, source))

    def blas(self, name: str, dtype: Dtype, *arguments: Any) -> None:
        """Call a routine of cuBLAS once; places become addresses, and floats numbers of the dtype."""
        given = tuple(
            Operand(one.operand, one.offset)
            if isinstance(one, Place)
            else Constant(one, dtype)
            if isinstance(one, float)
            else one
            for one in arguments
        )
        step: Any = CallStep(self.executor, Routine(name, dtype, given))  # which takes any arguments of a run
        self._steps.append(step)

    def call(self, name: str, *arguments: Any, count: int | None = None) -> None:
        """Call a routine for each matrix, or so many times."""
        times = self.batch if count is None else count
        self._steps.append(Call(self.executor, self.handle, name, arguments, times))

    def call_params(self, name: str, *arguments: Any) -> None:
        """Call a routine of the 64-bit interface that needs no workspace."""
        self.call(name, self.handle.params, *arguments)

    def call_x(
        self,
        name: str,
        *arguments: Any,
        info: Place,
        behind: Sequence[Any] = (),
        unasked: Place | None = None,
        count: int | None = None,
        params: bool = True,
    ) -> None:
        """Call a routine of the 64-bit interface, whose workspace is asked for now; `behind` stand after its info.

        The function that tells the workspace is not given what is `unasked`. Few routines have no `params`.
        """
        first = (self.handle.params,) if params else ()
        device, host = ctypes.c_size_t(), ctypes.c_size_t()
        asked = [self._as_asked(argument) for argument in arguments if argument is not unasked]
        batched = behind if name.endswith("Batched") else ()
        sizes = (ctypes.byref(device), ctypes.byref(host))
        ask = getattr(dn, f"{name}_bufferSize")
        ask(self.handle.follow(), *(one.handle for one in first), *asked, *sizes, *batched)
        memory = np.empty(host.value, np.uint8)
        work = (self.work(device.value), device.value, memory, host.value)
        self.call(name, *first, *arguments, *work, info, *behind, count=count)

    def call_with_work(
        self,
        name: str,
        dtype: Dtype,
        *arguments: Any,
        info: Place,
        behind: Sequence[Any] = (),
        count: int | None = None,
        asked: Sequence[Any] | None = None,
    ) -> None:
        """Call a routine of the 32-bit interface; its workspace, counted in elements, stands before its info.

        The function that tells the workspace is given the same arguments, or those that are `asked`, and what is behind
        but no None.
        """
        size = ctypes.c_int32()
        ask = getattr(dn, f"{name}_bufferSize")
        settings = tuple(getattr(one, "handle", one) for one in behind if one is not None)
        ask(
            self.handle.follow(),
            *map(self._as_asked, arguments if asked is None else asked),
            ctypes.byref(size),
            *settings,
        )
        work = self.work(size.value * dtype.itemsize)
        self.call(name, *arguments, work, size.value, info, *behind, count=count)

    def call_refined(
        self, name: str, params: Any, infos: Any, extents: Sequence[int], *arguments: Any, behind: Sequence[Any]
    ) -> None:
        """Call a routine of iterative refinement; its workspace, which its choices and extents tell, is in bytes."""
        size = ctypes.c_size_t()
        ask = getattr(dn, f"{name}_bufferSize")
        ask(self.handle.follow(), params.handle, *extents, ctypes.byref(size))
        self.call(name, params, infos, *extents, *arguments, self.work(size.value), size.value, *behind)

    def _as_asked(self, argument: Any) -> Any:
        """An argument as the routine is given it that tells a workspace's size: some memory of the device."""
        if isinstance(argument, Place):
            return self.executor.workspace.c_ptr
        if isinstance(argument, HostNumbers):
            return ctypes.c_void_p(argument.array.ctypes.data)
        if isinstance(argument, np.ndarray):
            return ctypes.c_void_p(argument.ctypes.data)
        return getattr(argument, "handle", argument)

    def plan(self, *, capture_safe: bool, idle: bool = False) -> SolverPlan:
        """The plan of all these steps; `idle` where no routine is among them."""
        keep = (
            self.handle.memory(self.executor, "scratch", self._scratch_bytes),
            self.handle.memory(self.executor, "work", self._work_bytes),
        )
        kind = IdlePlan if idle else SolverPlan
        return kind(self.executor, self.row, self._steps, keep, capture_safe=capture_safe)
