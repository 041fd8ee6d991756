"""The dropout requests carried out by `cudnnSetDropoutDescriptor`, `cudnnDropoutForward` and `cudnnDropoutBackward`.

A descriptor is bound to the memory of a state, so it is bound anew where another state is passed. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnndropoutforward.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.errors import Refused
from dispatch.libraries.cudnn.calls import CallPlan, NoOpPlan, Operand
from dispatch.libraries.cudnn.dropout_states import states_bytes
from dispatch.libraries.cudnn.tensors import Descriptor, tensor
from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutStatesRequest

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.dropout.request import DropoutRequest

__all__ = ["plan"]


def plan(request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of any of the requests; nothing is launched where there is no element."""
    if isinstance(request, DropoutStatesRequest):
        return StatesPlan(executor, row)
    source = request.dy if isinstance(request, DropoutBwdRequest) else request.x
    if source.size == 0:
        return NoOpPlan(row)
    flat = tensor(source.dtype, (source.size,), (1,))
    size = ctypes.c_size_t()
    cudnn.cudnnDropoutGetReserveSpaceSize(flat.handle, ctypes.byref(size))
    reserve = request.layout_of("reserve").size
    if size.value != reserve:
        raise Refused(f"cudnnDropoutGetReserveSpaceSize asks for {size.value} bytes, the request has {reserve}")
    if isinstance(request, DropoutBwdRequest):
        operands = (flat, Operand(0), flat, Operand(2), Operand(1), size)
        return DropoutPlan(executor, row, cudnn.cudnnDropoutBackward, operands, float(request.p), None)
    operands = (flat, Operand(0), flat, Operand(2), Operand(3), size)
    return DropoutPlan(executor, row, cudnn.cudnnDropoutForward, operands, float(request.p), 1)


class DropoutPlan(CallPlan):
    """A pass; `states` is where the state stands in the arguments, or None for the backward pass, which needs none."""

    __slots__ = ("_bound", "_dropout", "_p", "_states")

    def __init__(
        self, executor: CudaExecutor, row: Row, function: Any, arguments: tuple[Any, ...], p: float, states: int | None
    ) -> None:
        dropout = Descriptor("Dropout")
        super().__init__(executor, row, function, (dropout, *arguments))
        self._dropout, self._p, self._states = dropout, p, states
        self._bound: Argument = -1
        if states is None:  # it draws nothing, but cuDNN 9.19 refuses a descriptor without memory for a state
            self._bind(executor.workspace.c_ptr.value or 0)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        if self._states is not None and arguments[self._states] != self._bound:
            self._bind(arguments[self._states])
        super().enqueue(arguments)

    def _bind(self, address: Argument) -> None:
        """Let the descriptor draw from the state at an address; this launches nothing."""
        states: Any = address
        size = states_bytes(self._executor.device)
        cudnn.cudnnRestoreDropoutDescriptor(
            self._dropout.handle, self._handle.follow(), self._p, ctypes.c_void_p(states), size, 0
        )
        self._bound = address


class StatesPlan(CallPlan):
    """Seeds a state; the descriptor that does it is of no further use."""

    __slots__ = ("_dropout",)

    def __init__(self, executor: CudaExecutor, row: Row) -> None:
        super().__init__(executor, row, cudnn.cudnnSetDropoutDescriptor, (), capture_safe=False)
        self._dropout = Descriptor("Dropout")

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        address, seed = arguments
        states: Any = address
        cudnn.cudnnSetDropoutDescriptor(
            *(self._dropout.handle, self._handle.follow(), 0.5, ctypes.c_void_p(states)),
            *(states_bytes(self._executor.device), int(seed.real)),
        )
