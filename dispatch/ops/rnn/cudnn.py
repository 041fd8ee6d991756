"""The requests of recurrent networks carried out by `cudnnRNNForward`, `…BackwardData_v8` and `…BackwardWeights_v8`.

The lengths of sequences are known to the descriptors; the copy of them on the device that cuDNN once asked for it no
longer reads. Follows
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html#cudnnrnnforward.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.errors import BadRequest, Refused
from dispatch.keys import F32, F64, HALF, Compute, Dtype
from dispatch.libraries.cudnn.calls import CallPlan, Operand
from dispatch.libraries.cudnn.dropout_states import check_states, states_bytes
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, tensor_3d
from dispatch.ops.rnn.network import Network, RnnMode
from dispatch.ops.rnn.request import RnnBwdDataRequest, RnnBwdWeightsRequest, steps_first

if TYPE_CHECKING:
    from dispatch.core.request import Argument, Plan
    from dispatch.core.row import Row
    from dispatch.device.device import Device
    from dispatch.execute.cuda_executor import CudaExecutor
    from dispatch.ops.rnn.request import RnnBase, RnnRequest
    from dispatch.ops.rnn.weights import Places

__all__ = ["places", "plan", "reserve_bytes"]

INFERENCE = cudnn.cudnnForwardMode_t.CUDNN_FWD_MODE_INFERENCE
TRAINING = cudnn.cudnnForwardMode_t.CUDNN_FWD_MODE_TRAINING
LAYOUT = cudnn.cudnnRNNDataLayout_t
MATH = cudnn.cudnnMathType_t
ADD = cudnn.cudnnWgradMode_t.CUDNN_WGRAD_MODE_ADD  # cuDNN 9.19 refuses to overwrite, so the sums start from zeros
_known: weakref.WeakKeyDictionary[Device, dict[Any, Any]] = weakref.WeakKeyDictionary()
MAX_KNOWN = 4096  # answers of cuDNN on one device; the oldest goes first


class NetworkDescriptor:
    """The descriptors of a network and of its dropout, which the former points to."""

    def __init__(
        self, executor: CudaExecutor, network: Network, dtype: Dtype, compute: Compute | None, dropout: float
    ) -> None:
        self._executor, self._network, self._dtype, self._compute, self._p = executor, network, dtype, compute, dropout
        self.rnn, self._dropout = Descriptor("RNN"), Descriptor("Dropout")
        # Only a forward pass draws from the state; the others want some memory there, which they do not touch.
        self.bind(executor.workspace.c_ptr.value or 0)

    def bind(self, states: int) -> None:
        """Describe the network with masks that are drawn from the state at an address."""
        handle, dropout = handle_of(self._executor).follow(), self._dropout.handle
        if self._p:
            size = states_bytes(self._executor.device)
            cudnn.cudnnRestoreDropoutDescriptor(dropout, handle, self._p, ctypes.c_void_p(states), size, 0)
        else:
            cudnn.cudnnSetDropoutDescriptor(dropout, handle, 0.0, None, 0, 0)
        network = self._network
        cudnn.cudnnSetRNNDescriptor_v8(
            self.rnn.handle,
            cudnn.cudnnRNNAlgo_t.CUDNN_RNN_ALGO_STANDARD,
            cudnn.cudnnRNNMode_t(network.mode),
            cudnn.cudnnRNNBiasMode_t(network.bias),
            cudnn.cudnnDirectionMode_t(network.directions - 1),
            cudnn.cudnnRNNInputMode_t.CUDNN_LINEAR_INPUT,
            DTYPES[self._dtype],
            DTYPES[F64 if self._dtype is F64 else F32],
            self._math(),
            network.input_size,
            network.hidden_size,
            network.state_size,
            network.layers,
            dropout,
            cudnn.CUDNN_RNN_PADDED_IO_ENABLED,
        )

    def _math(self) -> cudnn.cudnnMathType_t:
        if self._dtype in HALF:
            return MATH.CUDNN_TENSOR_OP_MATH
        if self._dtype is F32 and self._compute is not Compute.COMPUTE_32F_FAST_TF32:
            return MATH.CUDNN_FMA_MATH  # the default would be TF32
        return MATH.CUDNN_DEFAULT_MATH


class Described:
    """The descriptors of a request, and what cuDNN asks for: workspace and reserve space."""

    def __init__(self, request: RnnBase, executor: CudaExecutor, mode: cudnn.cudnnForwardMode_t) -> None:
        network, (name, sequence) = request.network, request.sequence()
        handle = handle_of(executor).follow()
        self.dtype = sequence.dtype
        first = steps_first(request.layout_of(name))
        layout = LAYOUT.CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED
        if first is False:
            layout = LAYOUT.CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED
        self.network = NetworkDescriptor(executor, network, self.dtype, request.compute, float(request.dropout))
        self.rnn = self.network.rnn
        lengths = request.all_lengths()
        steps = sequence.shape[0]
        self.x = self._data(layout, steps, network.input_size, lengths)
        self.y = self._data(layout, steps, network.output_size, lengths)
        self.h = self._states(request, request.hidden_shape())
        self.c = self._states(request, request.cell_shape()) if network.mode is RnnMode.LSTM else None
        self.weights, self.workspace, self.reserve = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        cudnn.cudnnGetRNNWeightSpaceSize(handle, self.rnn.handle, ctypes.byref(self.weights))
        sizes = (ctypes.byref(self.workspace), ctypes.byref(self.reserve))
        cudnn.cudnnGetRNNTempSpaceSizes(handle, self.rnn.handle, mode, self.x.handle, *sizes)

    def _data(self, layout: Any, steps: int, size: int, lengths: tuple[int, ...]) -> Descriptor:
        made = Descriptor("RNNData")
        fill = ctypes.c_uint64(0)  # a zero of any dtype
        numbers = (ctypes.c_int32 * len(lengths))(*lengths)
        cudnn.cudnnSetRNNDataDescriptor(
            made.handle, DTYPES[self.dtype], layout, steps, len(lengths), size, numbers, ctypes.byref(fill)
        )
        return made

    def _states(self, request: RnnBase, shape: tuple[int, ...]) -> Descriptor:
        strides = (shape[1] * shape[2], shape[2], 1)
        return tensor_3d(request.device.layout(self.dtype, shape, strides, 256))

    def check(self, request: RnnBase) -> None:
        """Refused or BadRequest where cuDNN counts otherwise than the request does."""
        wanted = request.network.weight_count * self.dtype.itemsize
        if self.weights.value != wanted:
            raise Refused(f"cudnnGetRNNWeightSpaceSize asks for {self.weights.value} bytes, the network has {wanted}")
        reserve: Any = getattr(request, "reserve", None)
        if reserve is not None and reserve.nbytes != self.reserve.value:
            given, hint = str(reserve.layout), "pass on what training=True gave"
            raise BadRequest("reserve", given, f"u8[{self.reserve.value}]", hint)


def plan(request: RnnBase, executor: CudaExecutor, row: Row) -> Plan:
    """The plan of any of the three requests."""
    mode = TRAINING if getattr(request, "training", True) else INFERENCE
    states: Any = getattr(request, "states", None)
    if states is not None:
        check_states("states", states, binding=True)
    made = Described(request, executor, mode)
    made.check(request)
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


def reserve_bytes(request: RnnRequest) -> int:
    """What cuDNN wants for the reserve space of a forward pass in training."""
    layout = request.x.layout
    view = (layout.dtype.name, layout.shape, layout.strides)  # the layout itself would keep the device
    key = (request.network, request.compute, view, request.lengths, float(request.dropout))
    found = _known.setdefault(request.device, {}).get(key)
    if found is None:
        executor: Any = request.device.executor()
        found = _keep(request.device, key, Described(request, executor, TRAINING).reserve.value)
    return int(found)


def places(network: Network, dtype: Dtype, device: Device) -> Places:
    """Where the matrices and biases of a weight space lie, as `cudnnGetRNNWeightParams` says it, in elements."""
    key = (network, dtype.name)
    found: Places | None = _known.setdefault(device, {}).get(key)
    if found is None:
        executor: Any = device.executor()
        handle = handle_of(executor).follow()
        made = NetworkDescriptor(executor, network, dtype, None, 0.0)
        size = network.weight_count * dtype.itemsize
        parts = [_place(made.rnn, handle, size, dtype, part.pseudo_layer, part.linear) for part in network.parts()]
        found = _keep(device, key, parts)
    return found


def _keep(device: Device, key: Any, found: Any) -> Any:
    known = _known.setdefault(device, {})
    if len(known) >= MAX_KNOWN:
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread is about it, too
            del known[next(iter(known))]
    known[key] = found
    return found


def _place(rnn: Descriptor, handle: Any, size: int, dtype: Dtype, layer: int, linear: int) -> tuple[int, int]:
    matrix, bias = Descriptor("Tensor"), Descriptor("Tensor")
    base = 1 << 20  # an address that is never touched: only the distance from it counts
    start, bias_start = ctypes.c_void_p(), ctypes.c_void_p()
    cudnn.cudnnGetRNNWeightParams(
        *(handle, rnn.handle, layer, size, ctypes.c_void_p(base), linear),
        *(matrix.handle, ctypes.byref(start), bias.handle, ctypes.byref(bias_start)),
    )
    item = dtype.itemsize
    return ((start.value or base) - base) // item, ((bias_start.value or base) - base) // item
