"""Plans of one or more cuBLAS calls in sequence; each run only fills in addresses and numbers.

The ops decide which calls are made. Among the arguments of a routine `Operand(n)`, `Matrices(n)` and `Scalar(n)` stand
for the n-th argument of a run.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from cudabind.sys import cublas
from dispatch.core.request import Argument, IdlePlan, Plan
from dispatch.keys import C64, C128, F32, F64, U8, Dtype
from dispatch.libraries.cublas.handle import handle_of
from dispatch.libraries.cublas.pointers import PointerArray
from dispatch.libraries.cusolver.copies import Copy as KernelCopy
from dispatch.libraries.cusolver.copies import CopyMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.device.tensor import Tensor
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.libraries.cusolver.matrix import Matrix

__all__ = [
    "SCRATCH",
    "Constant",
    "CublasPlan",
    "Matrices",
    "MatrixCopy",
    "Operand",
    "Routine",
    "Scalar",
    "Scratch",
    "Task",
    "Zero",
    "function_name",
    "plan_of",
]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
MAX_INT = 2**31 - 1
SCRATCH = -1  # the position of scratch memory, whose address follows the arguments of a run


class Operand(NamedTuple):
    """The position of an operand's address in the arguments of a run, and an offset in bytes."""

    position: int
    offset: int = 0


class Scalar(NamedTuple):
    """The position of a number in the arguments of a run, and the dtype that the call reads."""

    position: int
    dtype: Dtype


class Constant(NamedTuple):
    """A number that is the same in every run."""

    value: complex
    dtype: Dtype


class Matrices(NamedTuple):
    """The addresses of an operand's matrices, as batched routines take them, by their offsets in bytes."""

    position: int
    offsets: tuple[int, ...]


class Routine(NamedTuple):
    """One call of cuBLAS, without the handle.

    It is skipped if the operands at the two positions `skip_if_same` are equal, or if the numbers at the positions in
    `skip_if` have these values.
    """

    name: str  # as in cublasStrsm, without the type's letter
    dtype: Dtype
    arguments: tuple[Any, ...]
    skip_if_same: tuple[int, int] | None = None
    on_device: bool = False  # whether its scalar result is written to the device
    skip_if: tuple[tuple[int, float], ...] = ()


class Zero(NamedTuple):
    """Set an operand to 0."""

    position: int
    nbytes: int


class Scratch(NamedTuple):
    """Scratch memory of a plan, with the position `SCRATCH`; a plan has at most one."""

    nbytes: int


class MatrixCopy(NamedTuple):
    """A copy of an operand with any strides to another, unless they are the same: by a kernel, not by cuBLAS.

    The driver's copy functions check addresses, and reject the relocatable addresses of a captured call.
    """

    source: Matrix
    target: Matrix
    batch: int = 1


Task = Routine | Zero | Scratch | MatrixCopy


def function_name(routine: str, dtype: Dtype, sizes: Sequence[int] = ()) -> str:
    """The name of a routine for a dtype; sizes beyond 31 bits use its 64-bit form.

    A routine that begins with a capital letter, such as "AxpyEx", has dtype arguments or has the dtypes in its name.
    """
    wide = "_64" if max(sizes, default=0) > MAX_INT else ""
    if routine[0].isupper():
        return f"cublas{routine}{wide}"
    letter = LETTERS[dtype]
    if routine in ("iamax", "iamin"):
        start = f"I{letter.lower()}"
    elif routine in ("asum", "nrm2") and dtype.is_complex:
        start = "Sc" if dtype is C64 else "Dz"
    else:
        start = letter
    name: str = getattr(
        cublas, f"cublas{start}{routine.removeprefix('i') if start[0] == 'I' else routine}{wide}"
    ).__name__
    return name


def function_of(name: str) -> Any:
    """The function with a name."""
    return getattr(cublas, name)


class HostScalar:
    """A number in host memory, as cuBLAS reads it."""

    __slots__ = ("_memory", "_parts", "address")

    def __init__(self, dtype: Dtype) -> None:
        self._parts = 2 if dtype.is_complex else 1
        kind = ctypes.c_float if dtype in (F32, C64) else ctypes.c_double
        self._memory = (kind * self._parts)()
        self.address = ctypes.c_void_p(ctypes.addressof(self._memory))

    def set(self, value: complex) -> None:
        """Write the number."""
        self._memory[0] = value.real
        if self._parts > 1:
            self._memory[1] = value.imag


class CallStep:
    """A routine with everything but the addresses and the numbers filled in."""

    __slots__ = (
        *("_arguments", "_executor", "_function", "_handle", "_numbers", "_on_device", "_pointers", "_slots"),
        *("_skip_if", "_skip_if_same"),
    )

    def __init__(self, executor: CudaExecutor, routine: Routine) -> None:
        self._executor, self._handle = executor, handle_of(executor)
        self._handle.follow(executor)  # allocates the workspace before a capture begins
        sizes = [argument for argument in routine.arguments if type(argument) is int]
        self._function: Any = function_of(function_name(routine.name, routine.dtype, sizes))
        self._skip_if_same, self._skip_if = routine.skip_if_same, routine.skip_if
        self._on_device = routine.on_device
        self._slots: list[tuple[ctypes.c_void_p, Operand]] = []
        self._numbers: list[tuple[HostScalar, Scalar | Constant]] = []
        self._pointers: list[PointerArray] = []
        self._arguments = tuple(map(self._prepared, routine.arguments))

    def _prepared(self, argument: Any) -> Any:
        if isinstance(argument, Operand):
            slot = ctypes.c_void_p()
            self._slots.append((slot, argument))
            return slot
        if isinstance(argument, Matrices):
            pointers = PointerArray(self._executor, *argument)
            self._pointers.append(pointers)
            return pointers.address
        if isinstance(argument, (Scalar, Constant)):
            number = HostScalar(argument.dtype)
            if isinstance(argument, Constant):
                number.set(argument.value)
            self._numbers.append((number, argument))  # keeps it alive
            return number.address
        return argument

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuBLAS on the executor's stream; raises cuBLAS's error."""
        if self._skip_if_same is not None:
            first, second = self._skip_if_same
            if arguments[first] == arguments[second]:
                return
        if self._skip_if and all(arguments[position] == number for position, number in self._skip_if):
            return
        for pointers in self._pointers:
            pointers.enqueue(arguments)
        for slot, (position, offset) in self._slots:
            address: Any = arguments[position]  # addresses are ints
            slot.value = address + offset if address else None
        for number, argument in self._numbers:
            if isinstance(argument, Scalar):
                number.set(arguments[argument.position])
        handle = self._handle.follow(self._executor, on_device=self._on_device)
        status = self._function.unchecked(handle, *self._arguments)
        if status:
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            raise self._function.error(status)


class CopyStep:
    """A copy by a kernel, skipped if both operands are the same."""

    __slots__ = ("_copy", "_source", "_target")

    def __init__(self, executor: CudaExecutor, moved: MatrixCopy) -> None:
        self._source, self._target = moved.source.pointer.operand, moved.target.pointer.operand
        self._copy = KernelCopy(executor, moved.source, moved.target, moved.batch, CopyMode.ALL, conj=False)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Copy."""
        if arguments[self._source] != arguments[self._target]:
            self._copy.enqueue(arguments)


class CublasPlan(Plan):
    """Calls, copies and fills in sequence."""

    __slots__ = ("_executor", "_scratch", "_steps")

    def __init__(self, executor: CudaExecutor, row: Row, tasks: Sequence[Task]) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        sizes = [task.nbytes for task in tasks if isinstance(task, Scratch)]
        self._scratch: Tensor | None = executor.empty((sizes[0],), (1,), U8) if sizes else None
        self._steps = tuple(self._prepared(task) for task in tasks if not isinstance(task, Scratch))

    def _prepared(self, task: Routine | Zero | MatrixCopy) -> CallStep | CopyStep | Zero:
        if isinstance(task, MatrixCopy):
            return CopyStep(self._executor, task)
        return CallStep(self._executor, task) if isinstance(task, Routine) else task

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        if self._scratch is not None:
            arguments = (*arguments, self._scratch.ptr)
        for step in self._steps:
            if isinstance(step, Zero):
                addresses: Any = arguments  # addresses are ints
                driver.cuMemsetD8Async(addresses[step.position], 0, step.nbytes, self._executor.target.value)
            else:
                step.enqueue(arguments)


def plan_of(executor: CudaExecutor, row: Row, tasks: Sequence[Task]) -> Plan:
    """The plan of a list of tasks, which may be empty."""
    return CublasPlan(executor, row, tasks) if tasks else IdlePlan(row)
