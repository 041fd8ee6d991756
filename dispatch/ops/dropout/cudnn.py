"""The dropout requests carried out by `cudnnSetDropoutDescriptor`, `cudnnDropoutForward` and `cudnnDropoutBackward`.

A descriptor is bound to the memory of a state, so it is bound anew where another state is passed. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-ops-library.html#cudnndropoutforward.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.cudnn.calls import CallPlan, NothingPlan, Operand
from dispatch.cudnn.handle import handle_of
from dispatch.cudnn.tensors import Descriptor, tensor
from dispatch.errors import Refused
from dispatch.ops.dropout.request import DropoutBwdRequest, DropoutStatesRequest

if TYPE_CHECKING:
    from dispatch.device import Device
    from dispatch.lane import CudaLane
    from dispatch.ops.dropout.request import DropoutRequest
    from dispatch.request import Argument, Plan
    from dispatch.row import Row

__all__ = ["plan", "states_bytes"]

_sizes: weakref.WeakKeyDictionary[Device, int] = weakref.WeakKeyDictionary()


def states_bytes(device: Device) -> int:
    """The size of a state on a GPU, as cuDNN says it: random numbers for each of its threads, some MiB."""
    known = _sizes.get(device)
    if known is None:
        size = ctypes.c_size_t()
        lane: Any = device.lane()
        cudnn.cudnnDropoutGetStatesSize(handle_of(lane).follow(), ctypes.byref(size))
        known = _sizes[device] = size.value
    return known


def plan(request: DropoutStatesRequest | DropoutRequest | DropoutBwdRequest, lane: CudaLane, row: Row) -> Plan:
    """The plan of any of the requests; nothing is launched where there is no element."""
    if isinstance(request, DropoutStatesRequest):
        return StatesPlan(lane, row)
    source = request.dy if isinstance(request, DropoutBwdRequest) else request.x
    if source.size == 0:
        return NothingPlan(row)
    flat = tensor(source.dtype, (source.size,), (1,))
    size = ctypes.c_size_t()
    cudnn.cudnnDropoutGetReserveSpaceSize(flat.handle, ctypes.byref(size))
    reserve = request.layout_of("reserve").size
    if size.value != reserve:
        raise Refused(f"cudnnDropoutGetReserveSpaceSize asks for {size.value} bytes, the request has {reserve}")
    if isinstance(request, DropoutBwdRequest):
        operands = (flat, Operand(0), flat, Operand(2), Operand(1), size)
        return DropoutPlan(lane, row, cudnn.cudnnDropoutBackward, operands, float(request.p), None)
    operands = (flat, Operand(0), flat, Operand(2), Operand(3), size)
    return DropoutPlan(lane, row, cudnn.cudnnDropoutForward, operands, float(request.p), 1)


class DropoutPlan(CallPlan):
    """A pass; `states` is where the state stands in the arguments, or None for the backward pass, which needs none."""

    __slots__ = ("_bound", "_dropout", "_p", "_states")

    def __init__(
        self, lane: CudaLane, row: Row, function: Any, arguments: tuple[Any, ...], p: float, states: int | None
    ) -> None:
        dropout = Descriptor("Dropout")
        super().__init__(lane, row, function, (dropout, *arguments))
        self._dropout, self._p, self._states = dropout, p, states
        self._bound: Argument = -1
        if states is None:  # it draws nothing, but cuDNN 9.19 refuses a descriptor without memory for a state
            self._bind(lane.workspace.c_ptr.value or 0)

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        if self._states is not None and arguments[self._states] != self._bound:
            self._bind(arguments[self._states])
        super().enqueue(arguments)

    def _bind(self, address: Argument) -> None:
        """Let the descriptor draw from the state at an address; this launches nothing."""
        states: Any = address
        size = states_bytes(self._lane.device)
        cudnn.cudnnRestoreDropoutDescriptor(
            self._dropout.handle, self._handle.follow(), self._p, ctypes.c_void_p(states), size, 0
        )
        self._bound = address


class StatesPlan(CallPlan):
    """Seeds a state; the descriptor that does it is of no further use."""

    __slots__ = ("_dropout",)

    def __init__(self, lane: CudaLane, row: Row) -> None:
        super().__init__(lane, row, cudnn.cudnnSetDropoutDescriptor, (), capture_safe=False)
        self._dropout = Descriptor("Dropout")

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        address, seed = arguments
        states: Any = address
        cudnn.cudnnSetDropoutDescriptor(
            *(self._dropout.handle, self._handle.follow(), 0.5, ctypes.c_void_p(states)),
            *(states_bytes(self._lane.device), int(seed.real)),
        )
