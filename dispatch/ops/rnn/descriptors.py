"""The cuDNN descriptors of a recurrent network, and the sizes and weight offsets that cuDNN returns for them.

The requests ask for the size of a reserve space, the weights for their offsets, and the plans pass the descriptors to
cuDNN's calls. Sizes and offsets are cached by device.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cudabind.sys import cudnn
from dispatch.keys import F32, F64, HALF, Compute, Dtype, member
from dispatch.libraries.cudnn.dropout_states import states_bytes
from dispatch.libraries.cudnn.handle import handle_of
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, tensor_3d
from dispatch.ops.rnn.network import Network, Places, RnnMode, steps_first

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.layout import Layout
    from dispatch.execute.cuda_executor import CudaExecutor

__all__ = ["INFERENCE", "TRAINING", "NetworkDescriptor", "SequenceDescriptors", "places", "reserve_bytes"]

Lengths = tuple[int, ...]

INFERENCE = cudnn.cudnnForwardMode_t.CUDNN_FWD_MODE_INFERENCE
TRAINING = cudnn.cudnnForwardMode_t.CUDNN_FWD_MODE_TRAINING
LAYOUT = cudnn.cudnnRNNDataLayout_t
MATH = cudnn.cudnnMathType_t
_cache: weakref.WeakKeyDictionary[Device, dict[Any, Any]] = weakref.WeakKeyDictionary()
MAX_CACHED = 4096  # cached results of cuDNN on one device; the oldest is dropped first


class NetworkDescriptor:
    """The descriptors of a network and of its dropout; the former points to the latter."""

    def __init__(
        self, executor: CudaExecutor, network: Network, dtype: Dtype, compute: Compute | None, dropout: float
    ) -> None:
        self._executor, self._network, self._dtype, self._compute, self._p = executor, network, dtype, compute, dropout
        self.rnn, self._dropout = Descriptor("RNN"), Descriptor("Dropout")
        # Only a forward pass draws from the state; the other passes need valid memory there, but do not access it.
        self.bind(executor.workspace.c_ptr.value or 0)

    def bind(self, states: int) -> None:
        """Describe the network, with masks that are drawn from the state at this address."""
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
            cudnn.cudnnRNNMode_t(member(network.mode)),
            cudnn.cudnnRNNBiasMode_t(network.bias_mode),
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


class SequenceDescriptors:
    """The descriptors of a network's sequences and states, and the sizes of workspace and reserve space from cuDNN.

    `layout` is that of x or y; it determines the steps, the sequences and the dtype.
    """

    def __init__(
        self,
        executor: CudaExecutor,
        mode: cudnn.cudnnForwardMode_t,
        network: Network,
        layout: Layout,
        lengths: Lengths,
        compute: Compute | None,
        dropout: float,
    ) -> None:
        handle = handle_of(executor).follow()
        self.dtype = layout.dtype
        order = LAYOUT.CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED
        if steps_first(layout) is False:
            order = LAYOUT.CUDNN_RNN_DATA_LAYOUT_BATCH_MAJOR_UNPACKED
        self.network = NetworkDescriptor(executor, network, self.dtype, compute, dropout)
        self.rnn = self.network.rnn
        steps, batch, _ = layout.shape
        self.x = self._data(order, steps, network.input_size, lengths)
        self.y = self._data(order, steps, network.output_size, lengths)
        self.h = self._states(layout.device, network.hidden_shape(batch))
        self.c = self._states(layout.device, network.cell_shape(batch)) if network.mode is RnnMode.LSTM else None
        self.weights, self.workspace, self.reserve = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        cudnn.cudnnGetRNNWeightSpaceSize(handle, self.rnn.handle, ctypes.byref(self.weights))
        sizes = (ctypes.byref(self.workspace), ctypes.byref(self.reserve))
        cudnn.cudnnGetRNNTempSpaceSizes(handle, self.rnn.handle, mode, self.x.handle, *sizes)

    def _data(self, layout: Any, steps: int, size: int, lengths: Lengths) -> Descriptor:
        descriptor = Descriptor("RNNData")
        fill = ctypes.c_uint64(0)  # a zero of any dtype
        numbers = (ctypes.c_int32 * len(lengths))(*lengths)
        cudnn.cudnnSetRNNDataDescriptor(
            descriptor.handle, DTYPES[self.dtype], layout, steps, len(lengths), size, numbers, ctypes.byref(fill)
        )
        return descriptor

    def _states(self, device: Device, shape: tuple[int, ...]) -> Descriptor:
        strides = (shape[1] * shape[2], shape[2], 1)
        return tensor_3d(device.layout(self.dtype, shape, strides, 256))


def reserve_bytes(network: Network, layout: Layout, lengths: Lengths, compute: Compute | None, dropout: float) -> int:
    """The size of the reserve space that cuDNN needs for a forward pass in training, for an x of this layout."""
    device, view = layout.device, (layout.dtype.name, layout.shape, layout.strides)  # no Layout: it holds the device
    key = (network, compute, view, lengths, dropout)
    size = _cache.setdefault(device, {}).get(key)
    if size is None:
        executor: Any = device.executor()
        described = SequenceDescriptors(executor, TRAINING, network, layout, lengths, compute, dropout)
        size = _cache_answer(device, key, described.reserve.value)
    return int(size)


def places(network: Network, dtype: Dtype, device: Device) -> Places:
    """The offsets of the matrices and biases of a weight space in elements, from `cudnnGetRNNWeightParams`."""
    key = (network, dtype.name)
    offsets: Places | None = _cache.setdefault(device, {}).get(key)
    if offsets is None:
        executor: Any = device.executor()
        handle = handle_of(executor).follow()
        descriptor = NetworkDescriptor(executor, network, dtype, None, 0.0)
        size = network.weight_count * dtype.itemsize
        parts = [
            _place(descriptor.rnn, handle, size, dtype, part.pseudo_layer, part.linear) for part in network.parts()
        ]
        offsets = _cache_answer(device, key, parts)
    return offsets


def _cache_answer(device: Device, key: Any, found: Any) -> Any:
    cached = _cache.setdefault(device, {})
    if len(cached) >= MAX_CACHED:
        with suppress(KeyError, RuntimeError, StopIteration):  # another thread may be removing it, too
            del cached[next(iter(cached))]
    cached[key] = found
    return found


def _place(rnn: Descriptor, handle: Any, size: int, dtype: Dtype, layer: int, linear: int) -> tuple[int, int]:
    matrix, bias = Descriptor("Tensor"), Descriptor("Tensor")
    base = 1 << 20  # an address that is never accessed: only the distance from it matters
    start, bias_start = ctypes.c_void_p(), ctypes.c_void_p()
    cudnn.cudnnGetRNNWeightParams(
        *(handle, rnn.handle, layer, size, ctypes.c_void_p(base), linear),
        *(matrix.handle, ctypes.byref(start), bias.handle, ctypes.byref(bias_start)),
    )
    item = dtype.itemsize
    return ((start.value or base) - base) // item, ((bias_start.value or base) - base) // item
