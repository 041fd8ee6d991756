"""Plans with one call of cuDNN's legacy API, such as `cudnnSoftmaxForward`: everything is prepared but the addresses.

The `cudnn` modules of the ops make them from descriptors; an executor runs and records them. The row and the op have
made all choices before.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind import driver
from dispatch.core.request import Argument, Plan
from dispatch.libraries.cudnn.handle import handle_of, last_error
from dispatch.libraries.cudnn.tensors import scalar_type

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cudabind._bind import StatusFunction
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.keys import Dtype

__all__ = ["CallPlan", "Operand", "number"]


class Operand:
    """A placeholder for an operand's address in a call: its index in the request's `arguments()`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def number(value: float, dtype: Dtype) -> Any:
    """alpha or beta: a pointer to a number in host memory, of the C type that cuDNN expects for tensors of a dtype."""
    return ctypes.pointer(scalar_type(dtype)(value))


class CallPlan(Plan):
    """One call of cuDNN: the handle, then `arguments`, with handles for descriptors and addresses for operands.

    `zeroed` lists operands, by index and size in bytes, whose memory is set to 0 before the call.
    """

    __slots__ = ("_arguments", "_executor", "_function", "_handle", "_keep", "_slots", "_zeroed")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        function: StatusFunction[Any],
        arguments: Sequence[Any],
        keep: Sequence[object] = (),
        *,
        zeroed: Sequence[tuple[int, int]] = (),
        capture_safe: bool = True,
    ) -> None:
        super().__init__(row, capture_safe=capture_safe)
        self._executor, self._function = executor, function
        self._handle = handle_of(executor)
        self._zeroed = tuple(zeroed)
        self._keep = tuple(keep)  # descriptors that other descriptors refer to, and workspace
        slots: list[tuple[ctypes.c_void_p, int]] = []
        ready: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Operand):
                slot = ctypes.c_void_p()
                slots.append((slot, argument.index))
                ready.append(slot)
            else:
                ready.append(argument)
        self._slots = slots
        self._keep += tuple(argument for argument in ready if hasattr(argument, "handle"))
        self._arguments = tuple(getattr(argument, "handle", argument) for argument in ready)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        for slot, index in self._slots:
            address: Any = arguments[index]  # addresses are ints
            slot.value = address or None
        for index, nbytes in self._zeroed:
            driver.cuMemsetD8Async(arguments[index], 0, nbytes, self._executor.target.value)
        self.call(self._function, self._arguments)

    def call(self, function: StatusFunction[Any], arguments: Sequence[Any]) -> None:
        """Call cuDNN on the executor's stream; raises its error, with the last error message."""
        status = function.unchecked(self._handle.follow(), *arguments)
        if status:
            message = last_error()
            self._executor.stream.done()  # raises DeviceFault if the device is lost
            error = function.error(status)
            error.text = message or error.text
            raise error
