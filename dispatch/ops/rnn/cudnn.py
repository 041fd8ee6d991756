"""The plans of recurrent networks with `cudnnRNNForward`, `…BackwardData_v8` and `…BackwardWeights_v8`.

The descriptors hold the lengths of the sequences. Older versions of cuDNN also needed a copy of the lengths on the
device; it is no longer read. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html#cudnnrnnforward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.errors import BadRequest, Refused
from dispatch.keys import member
from dispatch.libraries.cudnn.calls import CallPlan, Operand
from dispatch.libraries.cudnn.dropout_states import check_states
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.ops.rnn.descriptors import INFERENCE, TRAINING, NetworkDescriptor, SequenceDescriptors
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.rnn.request import RnnBase

__all__ = ["plan"]

ADD = cudnn.cudnnWgradMode_t.CUDNN_WGRAD_MODE_ADD  # cuDNN 9.19 refuses to overwrite, so the sums start from zeros


def plan(request: RnnBase, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of any of the three requests."""
    mode = TRAINING if getattr(request, "training", True) else INFERENCE
    states: Any = getattr(request, "states", None)
    if states is not None:
        check_states("states", states, binding=True)
    layout, dropout = request.sequence()[1].layout, float(request.dropout)
    descriptors = SequenceDescriptors(
        executor, mode, request.network, layout, request.all_lengths(), member(request.compute), dropout
    )
    _check(request, descriptors)
    scratch = handle_of(executor).scratch(executor, descriptors.workspace.value)
    keep = (descriptors.network, scratch)
    spaces = (descriptors.workspace, scratch.c_ptr, descriptors.reserve)
    arguments: tuple[Any, ...]
    sequences: tuple[Any, ...]
    if isinstance(request, RnnBwdDataRequest):
        y, dy, weights, reserve, hx, cx, dhy, dcy, dx, dhx, dcx = map(Operand, range(11))
        states = (descriptors.h, hx, dhy, dhx, descriptors.c, cx, dcy, dcx)
        arguments = (
            descriptors.rnn,
            None,
            descriptors.y,
            y,
            dy,
            descriptors.x,
            dx,
            *states,
            descriptors.weights,
            weights,
            *spaces,
            reserve,
        )
        return CallPlan(executor, row, cudnn.cudnnRNNBackwardData_v8, arguments, keep)
    if isinstance(request, RnnBwdWeightsRequest):
        x, y, reserve, hx, dweights = map(Operand, range(5))
        sequences = (descriptors.x, x, descriptors.h, hx, descriptors.y, y)
        arguments = (descriptors.rnn, ADD, None, *sequences, descriptors.weights, dweights, *spaces, reserve)
        zeroed = ((dweights.index, descriptors.weights.value),)
        return CallPlan(executor, row, cudnn.cudnnRNNBackwardWeights_v8, arguments, keep, zeroed=zeroed)
    x, weights, hx, cx, drawn, y, hy, cy, reserve = map(Operand, range(9))
    sequences = (descriptors.x, x, descriptors.y, y, descriptors.h, hx, hy, descriptors.c, cx, cy)
    arguments = (descriptors.rnn, mode, None, *sequences, descriptors.weights, weights, *spaces, reserve)
    return ForwardPlan(executor, row, arguments, keep, descriptors.network, drawn.index)


def _check(request: RnnBase, made: SequenceDescriptors) -> None:
    """Refused or BadRequest if cuDNN's sizes differ from the request's."""
    expected_bytes = request.network.weight_count * made.dtype.itemsize
    if made.weights.value != expected_bytes:
        raise Refused(
            f"cudnnGetRNNWeightSpaceSize asks for {made.weights.value} bytes, the network has {expected_bytes}"
        )
    reserve: Any = getattr(request, "reserve", None)
    if reserve is not None and reserve.nbytes != made.reserve.value:
        layout_text, hint = str(reserve.layout), "pass the reserve that training=True returned"
        raise BadRequest("reserve", layout_text, f"u8[{made.reserve.value}]", hint)


class ForwardPlan(CallPlan):
    """A forward pass; its descriptor is bound again when the masks are drawn from another state."""

    __slots__ = ("_bound", "_network", "_states")

    def __init__(
        self,
        executor: CudaExecutor,
        row: Row,
        arguments: tuple[Any, ...],
        keep: tuple[Any, ...],
        network: NetworkDescriptor,
        states: int,
    ) -> None:
        super().__init__(executor, row, cudnn.cudnnRNNForward, arguments, keep)
        self._network, self._states = network, states
        self._bound: Argument = 0

    def enqueue(self, arguments: tuple[Argument, ...]) -> None:
        states: Any = arguments[self._states]
        if states != self._bound:
            self._network.bind(states)
            self._bound = states
        super().enqueue(arguments)
