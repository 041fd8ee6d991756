"""Plans of one or more cuTENSOR calls in sequence: everything is prepared but the addresses and the numbers.

The ops choose the operations, and which arguments of a run each call gets; only cuTENSOR chooses anything here.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind import driver
from cudabind.errors import CutensorError
from cudabind.sys import cutensor
from dispatch.core.request import Argument, Plan
from dispatch.device.stream import relaxed
from dispatch.libraries.cublas.scalars import HostNumber
from dispatch.libraries.cutensor.descriptors import OWN_CHOICE, KernelPlan, Operation, Preference
from dispatch.libraries.cutensor.failures import failure, free_kept_memory
from dispatch.libraries.cutensor.handle import handle_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.row import Row
    from dispatch.device.storage import Storage
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["Call", "Constant", "Operand", "Scalar", "TensorPlan", "Zero"]


class Operand(NamedTuple):
    """The index of an operand's address in the arguments of a run."""

    place: int


class Scalar(NamedTuple):
    """The index of a number in the arguments of a run."""

    place: int


class Constant(NamedTuple):
    """A number that is the same in every run."""

    value: float


class Call(NamedTuple):
    """An operation, the function that executes it, and its arguments after the handle and the plan.

    With `uses_workspace`, the workspace and its size follow these arguments; the stream is last.
    """

    operation: Operation
    execute: str  # such as cutensorContract
    arguments: tuple[Operand | Scalar | Constant, ...]
    uses_workspace: bool = False
    preference: Preference = OWN_CHOICE


class Zero(NamedTuple):
    """Sets the bytes of an operand to 0."""

    place: int
    low: int  # offset of the first byte from the operand's address
    nbytes: int


class CallStep:
    """A call that is prepared except for the addresses and the numbers."""

    __slots__ = (
        *("_arguments", "_executor", "_function", "_handle", "_is_repeatable", "_numbers", "_slots", "_stream"),
        "kernel",
    )

    def __init__(self, executor: CudaExecutor, call: Call) -> None:
        self._executor, self._handle = executor, handle_of(executor)
        try:
            self.kernel = KernelPlan(self._handle.follow(), call.operation, call.preference)
        except CutensorError as error:
            raise failure(executor, error) from error
        # A factor of 0 means that nothing is added: the call does not read what it writes.
        self._is_repeatable = any(isinstance(one, Constant) and one.value == 0 for one in call.arguments)
        self._function: Any = getattr(cutensor, call.execute)
        self._slots: list[tuple[ctypes.c_void_p, int]] = []
        self._numbers: list[tuple[HostNumber, int]] = []
        self._arguments: tuple[Any, ...] = tuple(map(self._bind_argument, call.arguments))

    def set_workspace(self, address: int) -> None:
        """Set the workspace, which must be as large as the kernel needs."""
        size = self.kernel.workspace
        self._arguments = (*self._arguments, ctypes.c_void_p(address if size else None), size)

    def _bind_argument(self, argument: Operand | Scalar | Constant) -> Any:
        if isinstance(argument, Operand):
            slot = ctypes.c_void_p()
            self._slots.append((slot, argument.place))
            return slot
        number = HostNumber(self.kernel.scalar)
        place = -1
        if isinstance(argument, Constant):
            number.set(argument.value)
        else:
            place = argument.place
        self._numbers.append((number, place))  # keeps the number alive
        return number.address

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        """Call cuTENSOR on the executor's stream; raises its own error."""
        for slot, place in self._slots:
            address: Any = arguments[place]  # addresses are ints
            slot.value = address
        for number, place in self._numbers:
            if place >= 0:
                number.set(arguments[place])
        handle = self._handle.follow()
        status = self._function.unchecked(handle, self.kernel.plan.handle, *self._arguments, self._handle.c_stream)
        if status:
            self._retry_or_raise(status)

    def _retry_or_raise(self, status: int) -> None:
        """Make the call again if memory could be freed; raises the error of the failed call."""
        error = self._function.error(status)
        if self._is_repeatable and free_kept_memory(self._executor, error):
            handle = self._handle.follow()
            status = self._function.unchecked(handle, self.kernel.plan.handle, *self._arguments, self._handle.c_stream)
            if not status:
                return
            error = self._function.error(status)
        raise failure(self._executor, error)


class TensorPlan(Plan):
    """Calls and the steps around them, in order; they share one workspace.

    `in_order` says whether all work of a call runs on the stream. If a part of it may run concurrently, the host first
    waits for the enqueued work, and nothing is captured: cuTENSOR 2.8.1's contraction of three tensors gave wrong
    results on an H200 while its operands were still being written.
    """

    __slots__ = ("_executor", "_in_order", "_memory", "_steps")

    def __init__(
        self, executor: CudaExecutor, row: Row, calls: Sequence[Call | Zero], *, in_order: bool = True
    ) -> None:
        super().__init__(row, capture_safe=in_order)
        self._executor, self._in_order = executor, in_order
        self._memory: Storage | None = None
        self._steps = tuple(CallStep(executor, call) if isinstance(call, Call) else call for call in calls)
        needed = max((step.kernel.workspace for step in self._steps if isinstance(step, CallStep)), default=0)
        address = 0
        if needed:
            self._memory, address = handle_of(executor).memory(executor, needed)
        for step, call in zip(self._steps, calls, strict=True):
            if isinstance(step, CallStep) and isinstance(call, Call) and call.uses_workspace:
                step.set_workspace(address)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        memory = self._memory
        if memory is not None and memory.owner is not self._executor.stream:
            # The plan was made on another stream, while the caller captured the executor's; that stream has finished
            # since.
            memory.owner = memory.writer = self._executor.stream
        if not self._in_order:
            with relaxed():
                driver.cuStreamSynchronize(self._executor.target.value)
        for step in self._steps:
            if isinstance(step, Zero):
                places: Any = arguments  # addresses are ints
                at = places[step.place] + step.low
                driver.cuMemsetD8Async(at, 0, step.nbytes, self._executor.target.value)
            else:
                step.enqueue(arguments)
