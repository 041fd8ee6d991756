"""Plans of one or more calls of cuBLAS, one behind the other: all is ready but the addresses and the numbers.

The ops say which calls; nothing is chosen here. In the arguments of a routine `Operand(n)`, `Matrices(n)` and
`Scalar(n)` stand for what the n-th argument of a run becomes.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from cudabind.sys import cublas
from dispatch.core.request import Argument, IdlePlan, Plan
from dispatch.keys import C64, C128, F32, F64, U8, Dtype
from dispatch.libraries.cublas.handle import handle_of
from dispatch.libraries.cublas.pointers import Pointers
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
    "Moved",
    "Operand",
    "Routine",
    "Scalar",
    "Scratch",
    "Work",
    "Zero",
    "function_name",
    "plan_of",
]

LETTERS = {F32: "S", F64: "D", C64: "C", C128: "Z"}
MAX_INT = 2**31 - 1
SCRATCH = -1  # the place of scratch memory, behind the arguments of a run


class Operand(NamedTuple):
    """The place of an operand's address in the arguments of a run, and how many bytes behind it the call begins."""

    place: int
    offset: int = 0


class Scalar(NamedTuple):
    """The place of a number in the arguments of a run, and the type that the call reads it as."""

    place: int
    dtype: Dtype


class Constant(NamedTuple):
    """A number that is the same in every run."""

    value: complex
    dtype: Dtype


class Matrices(NamedTuple):
    """The addresses of an operand's matrices, as batched routines take them: so many bytes behind its own."""

    place: int
    offsets: tuple[int, ...]


class Routine(NamedTuple):
    """One call of cuBLAS, as the op says it, without the handle.

    With `unless_same` it is left out where the operands at these two places are one, with `unless` where the numbers
    at these places are these.
    """

    name: str  # as in cublasStrsm, without the type's letter
    dtype: Dtype
    arguments: tuple[Any, ...]
    unless_same: tuple[int, int] | None = None
    on_device: bool = False  # whether its result, a number, is written to the device
    unless: tuple[tuple[int, float], ...] = ()


class Zero(NamedTuple):
    """The bytes of an operand set to 0."""

    place: int
    nbytes: int


class Scratch(NamedTuple):
    """So many bytes that a plan keeps for itself, at the place `SCRATCH`; no more than one of a plan's works."""

    nbytes: int


class Moved(NamedTuple):
    """Elements of one operand copied to another, unless they are one, of any strides: by a kernel, not by cuBLAS.

    The driver's own copies look at addresses, and refuse those that a call is captured at to be relocated.
    """

    source: Matrix
    target: Matrix
    batch: int = 1


Work = Routine | Zero | Scratch | Moved


def function_name(routine: str, dtype: Dtype, sizes: Sequence[int] = ()) -> str:
    """What cuBLAS calls a routine for a dtype; with sizes beyond 31 bits the one that takes 64.

    One that is said with a capital letter, as "AxpyEx", takes its dtypes as arguments or has them in its name.
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
    """The function of a name."""
    return getattr(cublas, name)


class Number:
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
        *("_unless", "_unless_same"),
    )

    def __init__(self, executor: CudaExecutor, routine: Routine) -> None:
        self._executor, self._handle = executor, handle_of(executor)
        self._handle.follow(executor)  # so that the workspace is there before anything is captured
        sizes = [argument for argument in routine.arguments if type(argument) is int]
        self._function: Any = function_of(function_name(routine.name, routine.dtype, sizes))
        self._unless_same, self._unless = routine.unless_same, routine.unless
        self._on_device = routine.on_device
        self._slots: list[tuple[ctypes.c_void_p, Operand]] = []
        self._numbers: list[tuple[Number, Scalar | Constant]] = []
        self._pointers: list[Pointers] = []
        self._arguments = tuple(map(self._prepared, routine.arguments))

    def _prepared(self, argument: Any) -> Any:
        if isinstance(argument, Operand):
            slot = ctypes.c_void_p()
            self._slots.append((slot, argument))
            return slot
        if isinstance(argument, Matrices):
            pointers = Pointers(self._executor, *argument)
            self._pointers.append(pointers)
            return pointers.address
        if isinstance(argument, (Scalar, Constant)):
            number = Number(argument.dtype)
            if isinstance(argument, Constant):
                number.set(argument.value)
            self._numbers.append((number, argument))  # which keeps it
            return number.address
        return argument

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuBLAS on the executor's stream; raises its own error."""
        if self._unless_same is not None:
            one, other = self._unless_same
            if arguments[one] == arguments[other]:
                return
        if self._unless and all(arguments[place] == number for place, number in self._unless):
            return
        for pointers in self._pointers:
            pointers.enqueue(arguments)
        for slot, (place, offset) in self._slots:
            address: Any = arguments[place]  # addresses are ints
            slot.value = address + offset if address else None
        for number, said in self._numbers:
            if isinstance(said, Scalar):
                number.set(arguments[said.place])
        handle = self._handle.follow(self._executor, on_device=self._on_device)
        status = self._function.unchecked(handle, *self._arguments)
        if status:
            self._executor.stream.done()  # raises DeviceFault where it is the device that is lost
            raise self._function.error(status)


class MoveStep:
    """A copy by a kernel, left out where the operands are one."""

    __slots__ = ("_copy", "_source", "_target")

    def __init__(self, executor: CudaExecutor, moved: Moved) -> None:
        self._source, self._target = moved.source.pointer.operand, moved.target.pointer.operand
        self._copy = KernelCopy(executor, moved.source, moved.target, moved.batch, CopyMode.ALL, conj=False)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Copy."""
        if arguments[self._source] != arguments[self._target]:
            self._copy.enqueue(arguments)


class CublasPlan(Plan):
    """Calls and what is around them, in their order."""

    __slots__ = ("_executor", "_scratch", "_steps")

    def __init__(self, executor: CudaExecutor, row: Row, works: Sequence[Work]) -> None:
        super().__init__(row, capture_safe=True)
        self._executor = executor
        sizes = [work.nbytes for work in works if isinstance(work, Scratch)]
        self._scratch: Tensor | None = executor.empty((sizes[0],), (1,), U8) if sizes else None
        self._steps = tuple(self._prepared(work) for work in works if not isinstance(work, Scratch))

    def _prepared(self, work: Routine | Zero | Moved) -> CallStep | MoveStep | Zero:
        if isinstance(work, Moved):
            return MoveStep(self._executor, work)
        return CallStep(self._executor, work) if isinstance(work, Routine) else work

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        if self._scratch is not None:
            arguments = (*arguments, self._scratch.ptr)
        for step in self._steps:
            if isinstance(step, Zero):
                places: Any = arguments  # addresses are ints
                driver.cuMemsetD8Async(places[step.place], 0, step.nbytes, self._executor.target.value)
            else:
                step.enqueue(arguments)


def plan_of(executor: CudaExecutor, row: Row, works: Sequence[Work]) -> Plan:
    """The plan of what cuBLAS is to do, which may be nothing."""
    return CublasPlan(executor, row, works) if works else IdlePlan(row)
