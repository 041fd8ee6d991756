"""The requests of recurrent networks carried out by `cudnnRNNForward`, `…BackwardData_v8` and `…BackwardWeights_v8`.

The lengths of sequences are known to the descriptors; the copy of them on the device that cuDNN once asked for it no
longer reads. Follows
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
    made = SequenceDescriptors(
        executor, mode, request.network, layout, request.all_lengths(), member(request.compute), dropout
    )
    _check(request, made)
    scratch = handle_of(executor).scratch(executor, made.workspace.value)
    keep = (made.network, scratch)
    spaces = (made.workspace, scratch.c_ptr, made.reserve)
    arguments: tuple[Any, ...]
    sequences: tuple[Any, ...]
    if isinstance(request, RnnBwdDataRequest):
        y, dy, weights, reserve, hx, cx, dhy, dcy, dx, dhx, dcx = map(Operand, range(11))
        states = (made.h, hx, dhy, dhx, made.c, cx, dcy, dcx)
        arguments = (made.rnn, None, made.y, y, dy, made.x, dx, *states, made.weights, weights, *spaces, reserve)
        return CallPlan(executor, row, cudnn.cudnnRNNBackwardData_v8, arguments, keep)
    if isinstance(request, RnnBwdWeightsRequest):
        x, y, reserve, hx, dweights = map(Operand, range(5))
        sequences = (made.x, x, made.h, hx, made.y, y)
        arguments = (made.rnn, ADD, None, *sequences, made.weights, dweights, *spaces, reserve)
        zeroed = ((dweights.index, made.weights.value),)
        return CallPlan(executor, row, cudnn.cudnnRNNBackwardWeights_v8, arguments, keep, zeroed=zeroed)
    x, weights, hx, cx, drawn, y, hy, cy, reserve = map(Operand, range(9))
    sequences = (made.x, x, made.y, y, made.h, hx, hy, made.c, cx, cy)
    arguments = (made.rnn, mode, None, *sequences, made.weights, weights, *spaces, reserve)
    return ForwardPlan(executor, row, arguments, keep, made.network, drawn.index)


def _check(request: RnnBase, made: SequenceDescriptors) -> None:
    """Refused or BadRequest where cuDNN counts otherwise than the request does."""
    wanted = request.network.weight_count * made.dtype.itemsize
    if made.weights.value != wanted:
        raise Refused(f"cudnnGetRNNWeightSpaceSize asks for {made.weights.value} bytes, the network has {wanted}")
    reserve: Any = getattr(request, "reserve", None)
    if reserve is not None and reserve.nbytes != made.reserve.value:
        given, hint = str(reserve.layout), "pass on what training=True gave"
        raise BadRequest("reserve", given, f"u8[{made.reserve.value}]", hint)


class ForwardPlan(CallPlan):
    """A forward pass, whose descriptor is bound anew where its masks are to be drawn from another state."""

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
