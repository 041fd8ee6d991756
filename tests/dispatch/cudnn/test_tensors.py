"""Descriptors of cuDNN, which need no GPU: what was put into one is read back, and each is destroyed once."""

import ctypes
import gc

import numpy as np
import pytest

import dispatch
from cudabind import _load
from cudabind.errors import LibraryNotFound
from cudabind.sys import cudnn
from dispatch.keys import BF16, F16, F32, F64
from dispatch.libraries.cudnn.calls import number
from dispatch.libraries.cudnn.tensors import DTYPES, Descriptor, scalar_type, tensor, tensor_3d

KINDS = ("Tensor", "Pooling", "Activation", "ReduceTensor", "Dropout", "RNN", "RNNData", "CTCLoss")


@pytest.fixture(autouse=True)
def _with_cudnn():
    try:
        _load.open("cudnn")
    except LibraryNotFound as missing:
        pytest.skip(str(missing))


def read(descriptor, axes=8):
    """dtype, extents and strides of a tensor's descriptor."""
    dtype, count = ctypes.c_int32(), ctypes.c_int32()
    extents, strides = (ctypes.c_int32 * axes)(), (ctypes.c_int32 * axes)()
    cudnn.cudnnGetTensorNdDescriptor(
        descriptor.handle, axes, ctypes.byref(dtype), ctypes.byref(count), extents, strides
    )
    return dtype.value, list(extents[: count.value]), list(strides[: count.value])


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
def test_a_tensor_says_what_it_was_given(dtype):
    assert read(tensor(dtype, (2, 3, 4, 5), (60, 1, 15, 3))) == (DTYPES[dtype], [2, 3, 4, 5], [60, 1, 15, 3])


def test_short_tensors_get_axes_of_one_element():
    assert read(tensor(F32, (7,), (2,)))[1:] == ([7, 1, 1, 1], [2, 1, 1, 1])
    assert read(tensor(F32, (), ()))[1:] == ([1, 1, 1, 1], [1, 1, 1, 1])


def test_a_tensor_of_three_axes_keeps_them():
    layout = dispatch.device("host").zeros((2, 3, 5)).layout
    assert read(tensor_3d(layout))[1:] == ([2, 3, 5], [15, 5, 1])


@pytest.mark.parametrize(("shape", "added", "steps"), [((5, 4), 1, [4, 4, 1]), ((3, 4), 0, [12, 4, 1])])
def test_axes_of_one_element_step_as_in_a_dense_tensor(shape, added, steps):
    """A view has 0 there, which says of one sequence, or of one step, that all of them are the first."""
    view = dispatch.device("host").zeros(shape)[(slice(None),) * added + (None,)]
    assert view.layout.strides[added] == 0
    assert read(tensor_3d(view.layout))[1:] == (list(view.shape), steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_descriptor_is_destroyed_once(kind):
    made, calls = Descriptor(kind), []
    real = made._destroy

    def counted(handle):
        calls.append(real(handle))
        return calls[-1]

    made._destroy = counted
    del made
    gc.collect()
    assert calls == [0]  # CUDNN_STATUS_SUCCESS


def test_numbers_are_of_the_type_that_cudnn_reads():
    assert scalar_type(F64) is ctypes.c_double
    assert {scalar_type(dtype) for dtype in (F32, F16, BF16)} == {ctypes.c_float}
    assert number(0.5, F64).contents.value == 0.5
    assert np.float32(number(0.1, F16).contents.value) == np.float32(0.1)
