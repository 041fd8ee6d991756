"""cuDNN's functions with a descriptor per tensor: softmax, pooling, activation, reduction, and what a refusal says."""

from __future__ import annotations

from ctypes import byref, c_float, c_int32, c_size_t, create_string_buffer

import numpy as np
import pytest

from cudabind.errors import CudnnError
from cudabind.sys import cudnn

LIBRARIES = ("cudnn",)
F32 = cudnn.cudnnDataType_t.CUDNN_DATA_FLOAT
NCHW = cudnn.cudnnTensorFormat_t.CUDNN_TENSOR_NCHW
NAN = cudnn.cudnnNanPropagation_t.CUDNN_PROPAGATE_NAN
ONE, ZERO = c_float(1), c_float(0)
EPS = np.finfo(np.float32).eps


@pytest.fixture
def handle(gpu):
    return gpu.make(cudnn.cudnnHandle_t, cudnn.cudnnCreate, cudnn.cudnnDestroy)


@pytest.fixture
def tensor(gpu):
    """The descriptor of a tensor of four axes, packed in NumPy's order."""

    def make(shape):
        made = gpu.make(
            cudnn.cudnnTensorDescriptor_t, cudnn.cudnnCreateTensorDescriptor, cudnn.cudnnDestroyTensorDescriptor
        )
        cudnn.cudnnSetTensor4dDescriptor(made, NCHW, F32, *shape)
        return made

    return make


def test_softmax_over_channels(gpu, handle, tensor, rng, close):
    x = (3 * rng.standard_normal((3, 10, 5, 7))).astype(np.float32)
    d_y, desc = gpu.poisoned(x.shape, np.float32), tensor(x.shape)
    cudnn.cudnnSoftmaxForward(
        *(handle, cudnn.cudnnSoftmaxAlgorithm_t.CUDNN_SOFTMAX_ACCURATE),
        *(cudnn.cudnnSoftmaxMode_t.CUDNN_SOFTMAX_MODE_CHANNEL, byref(ONE), desc, gpu.array(x).ptr),
        *(byref(ZERO), desc, d_y.ptr),
    )
    shifted = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    expected = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    # The difference in the exponent rounds to eps of itself, which is a relative error of the result; then exp rounds,
    # and so do the sum of ten and the division.
    close(d_y.numpy(), expected, (2 * np.abs(shifted).max() + 20) * EPS * expected)


def test_max_pooling_with_overlap_and_padding(gpu, handle, tensor, rng):
    x = rng.standard_normal((2, 3, 11, 8)).astype(np.float32)
    pooling = gpu.make(
        cudnn.cudnnPoolingDescriptor_t, cudnn.cudnnCreatePoolingDescriptor, cudnn.cudnnDestroyPoolingDescriptor
    )
    cudnn.cudnnSetPooling2dDescriptor(pooling, cudnn.cudnnPoolingMode_t.CUDNN_POOLING_MAX, NAN, 3, 3, 1, 1, 2, 2)
    x_desc, shape = tensor(x.shape), [c_int32() for _ in range(4)]
    cudnn.cudnnGetPooling2dForwardOutputDim(pooling, x_desc, *(byref(extent) for extent in shape))
    out = tuple(extent.value for extent in shape)
    assert out == (2, 3, 6, 4)

    d_y = gpu.poisoned(out, np.float32)
    cudnn.cudnnPoolingForward(handle, pooling, byref(ONE), x_desc, gpu.array(x).ptr, byref(ZERO), tensor(out), d_y.ptr)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    assert np.array_equal(d_y.numpy(), windows.max(axis=(4, 5)))


def test_an_activation_scaled_and_added_to_what_is_there(gpu, handle, tensor, rng, close):
    x, y = rng.standard_normal((2, 2, 5, 3, 7)).astype(np.float32)
    activation = gpu.make(
        cudnn.cudnnActivationDescriptor_t, cudnn.cudnnCreateActivationDescriptor, cudnn.cudnnDestroyActivationDescriptor
    )
    cudnn.cudnnSetActivationDescriptor(activation, cudnn.cudnnActivationMode_t.CUDNN_ACTIVATION_TANH, NAN, 0.0)
    desc, d_y = tensor(x.shape), gpu.array(y)
    alpha, beta = c_float(2), c_float(-0.5)
    cudnn.cudnnActivationForward(handle, activation, byref(alpha), desc, gpu.array(x).ptr, byref(beta), desc, d_y.ptr)
    # tanh of f32 is within a few units of its last place, on all of cuDNN's ways to compute it.
    close(d_y.numpy(), 2 * np.tanh(x.astype(np.float64)) - 0.5 * y, 16 * EPS * (2 + np.abs(y)))


def test_a_reduction_over_three_of_four_axes(gpu, handle, tensor, rng, close):
    x = rng.standard_normal((4, 6, 9, 5)).astype(np.float32)
    reduce = gpu.make(
        cudnn.cudnnReduceTensorDescriptor_t,
        cudnn.cudnnCreateReduceTensorDescriptor,
        cudnn.cudnnDestroyReduceTensorDescriptor,
    )
    cudnn.cudnnSetReduceTensorDescriptor(
        *(reduce, cudnn.cudnnReduceTensorOp_t.CUDNN_REDUCE_TENSOR_ADD, F32, NAN),
        cudnn.cudnnReduceTensorIndices_t.CUDNN_REDUCE_TENSOR_NO_INDICES,
        cudnn.cudnnIndicesType_t.CUDNN_32BIT_INDICES,
    )
    x_desc, y_desc, size = tensor(x.shape), tensor((1, 6, 1, 1)), c_size_t()
    cudnn.cudnnGetReductionWorkspaceSize(handle, reduce, x_desc, y_desc, byref(size))
    d_y = gpu.poisoned((1, 6, 1, 1), np.float32)
    cudnn.cudnnReduceTensor(
        *(handle, reduce, None, 0, gpu.workspace(size), size.value),
        *(byref(ONE), x_desc, gpu.array(x).ptr, byref(ZERO), y_desc, d_y.ptr),
    )
    axes = {"axis": (0, 2, 3), "keepdims": True}
    close(d_y.numpy(), x.astype(np.float64).sum(**axes), 4 * 9 * 5 * EPS * np.abs(x).astype(np.float64).sum(**axes))


def test_a_refusal_has_a_name_and_the_library_can_say_more(tensor):
    with pytest.raises(CudnnError) as caught:
        tensor((1, -1, 1, 1))
    assert caught.value.name.startswith("CUDNN_STATUS_BAD_PARAM")
    assert caught.value.function == "cudnnSetTensor4dDescriptor"
    message = create_string_buffer(512)
    cudnn.cudnnGetLastErrorString(message, len(message))
    assert message.value
