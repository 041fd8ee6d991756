"""Tensors and devices of the host: NumPy's views without copies, and no touch of memory that is gone."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import dispatch
from dispatch.device.indexing import indexed
from dispatch.errors import BadIndex, BadRequest, DeviceUnavailable, StaleTensor
from dispatch.keys import BF16, F32, Dtype

NAMES = list(Dtype.by_name)


@pytest.fixture
def dev():
    return dispatch.device("host")


def numbers(rng, shape, dtype):
    """Random values that the dtype holds."""
    dtype = Dtype.of(dtype)
    if dtype.name == "e8m0":
        return (2.0 ** rng.integers(-5, 5, shape)).astype(dtype.numpy)
    values = rng.standard_normal(shape) if dtype.numpy.kind not in "iub" else rng.integers(0, 100, shape)
    return (values + 1j * values if dtype.is_complex else values).astype(dtype.numpy)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (2, 3, 4)])
def test_an_array_goes_in_and_comes_out_unchanged(dev, rng, name, shape):
    values = numbers(rng, shape, name)
    tensor = dev.array(values)
    assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.size) == (shape, name, len(shape), values.size)
    assert tensor.nbytes == (values.size * Dtype.of(name).bits + 7) // 8
    back = tensor.numpy()
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(
        back.view(np.uint8) if values.ndim else back, values.view(np.uint8) if values.ndim else values
    )
    assert not np.shares_memory(back, values)


def test_a_dtype_is_converted_on_the_way_in(dev):
    tensor = dev.array([[1, 2.5], [3, 4]], "bf16")
    assert tensor.dtype is BF16
    np.testing.assert_array_equal(tensor.numpy().astype(float), [[1, 2.5], [3, 4]])
    assert dev.array([1.0]).dtype == "f64"


@pytest.mark.parametrize("index", [
    0, -1, slice(1, 3), slice(None, None, 2), slice(None, None, -1), (1, 2), (slice(None), 1), (..., 2), (None, 1),
    (slice(2, 0, -1), slice(None, None, 3)), (1, ..., None), slice(5, 5), (0, 1, 2),
])  # fmt: skip
@pytest.mark.parametrize("name", ["f32", "bf16", "f8e4m3", "i64", "c128"])
def test_basic_indexing_gives_numpys_view(dev, rng, index, name):
    values = numbers(rng, (4, 5, 6), name)
    tensor = dev.array(values)
    view = tensor[index]
    expected = values[index if isinstance(index, tuple) and Ellipsis in index else (*np.index_exp[index], ...)]
    assert view.shape == expected.shape
    np.testing.assert_array_equal(view.numpy(), expected)
    if expected.size:
        assert view.strides == expected.strides
        assert view.ptr - tensor.ptr == expected.ctypes.data - values.ctypes.data
        assert view.storage is tensor.storage


def test_ints_and_slices_are_what_numpy_makes_of_them(dev, rng):
    """They are computed without it: as often as not of views of views, with steps, from behind and beyond the end."""
    taken = 0
    for _ in range(3000):
        shape = tuple(rng.integers(1, 6, rng.integers(0, 4)))
        values = np.arange(int(np.prod(shape)), dtype="f4").reshape(shape)
        tensor, frame = dev.array(values), values
        for _ in range(2):
            index = tuple(drawn(rng) for _ in range(int(rng.integers(0, frame.ndim + 1))))
            try:
                expected = frame[(*index, ...)]
            except IndexError:
                with pytest.raises(BadIndex):
                    tensor[index]
                break
            taken += indexed(tensor.shape, tensor.layout.strides, 32, index) is not None
            tensor = tensor[index[0] if len(index) == 1 and rng.random() < 0.5 else index]
            assert tensor.shape == expected.shape
            if not expected.size:
                break
            assert tensor.strides == expected.strides
            assert tensor.numpy().tolist() == expected.tolist()
            frame = expected
    assert taken > 2000


def drawn(rng):
    """An int or a slice, mostly within a short axis."""
    ends = [None if rng.random() < 0.3 else int(rng.integers(-7, 8)) for _ in range(2)]
    step = None if rng.random() < 0.4 else int(rng.choice([-3, -2, -1, 1, 2, 3, 9]))
    return int(rng.integers(-4, 4)) if rng.random() < 0.4 else slice(*ends, step)


@pytest.mark.parametrize("index", [[0, 1], np.array([True, False, True]), 1.0, "a", True, (0, [1])])
def test_other_indexing_is_refused(dev, index):
    with pytest.raises(BadRequest) as caught:
        dev.zeros((3, 3))[index]
    assert caught.value.operand == "index"


def test_writing_through_a_view_shows_in_the_whole(dev):
    tensor = dev.zeros((3, 4))
    tensor[1].copy_from(np.arange(4))
    tensor.T[3].copy_from([7, 8, 9])
    np.testing.assert_array_equal(tensor.numpy(), [[0, 0, 0, 7], [0, 1, 2, 8], [0, 0, 0, 9]])


def test_transposes_are_views(dev, rng):
    values = numbers(rng, (2, 3, 4), "f32")
    tensor = dev.array(values)
    pairs = [(tensor.T, values.T), (tensor.mT, values.swapaxes(1, 2)), (tensor.transpose(), values.transpose())]
    pairs += [(tensor.transpose(axes), values.transpose(axes)) for axes in ((1, 2, 0), (-1, 0, 1))]
    for view, expected in [*pairs, (tensor.transpose(0, 2, 1), values.transpose(0, 2, 1))]:
        assert (view.shape, view.strides, view.ptr) == (expected.shape, expected.strides, tensor.ptr)
        np.testing.assert_array_equal(view.numpy(), expected)
    with pytest.raises(BadRequest):
        _ = dev.zeros((3,)).mT
    for axes in ((0, 1), (0, 0, 1), (0, 1, 3), ("a", 1, 2)):
        with pytest.raises(BadRequest) as caught:
            tensor.transpose(*axes)
        assert caught.value.operand == "axes"


@pytest.mark.parametrize("shape", [(6, 4), (24,), (2, -1), (1, 24, 1), (2, 3, 2, 2)])
def test_reshape_is_a_view(dev, rng, shape):
    values = numbers(rng, (2, 3, 4), "f16")
    tensor = dev.array(values)
    for view in (tensor.reshape(shape), tensor.reshape(*shape)):
        np.testing.assert_array_equal(view.numpy(), values.reshape(shape))
        assert view.ptr == tensor.ptr


def test_a_reshape_that_needs_a_copy_is_refused(dev):
    for tensor, shape in ((dev.zeros((3, 4)).T, (12,)), (dev.zeros((3, 4)), (5, 5)), (dev.zeros((4, 4))[:, :2], (8,))):
        with pytest.raises(BadRequest) as caught:
            tensor.reshape(shape)
        assert caught.value.operand == "shape"


def test_numpy_sees_the_very_memory_of_a_host_tensor(dev):
    tensor = dev.zeros((2, 3))
    view = np.asarray(tensor)
    view[1, 2] = 5
    assert tensor.numpy()[1, 2] == 5
    assert view.ctypes.data == tensor.ptr
    copied = np.array(tensor, copy=True)
    copied[0, 0] = 9
    assert tensor.numpy()[0, 0] == 0
    assert np.asarray(tensor, np.float64).dtype == np.float64


def test_a_view_keeps_the_memory_alive(dev, rng):
    values = numbers(rng, (64, 64), "f32")
    view = np.asarray(dev.array(values)[1:])
    part = dev.array(values)[2]
    gc.collect()
    junk = [dev.zeros((64, 64)) for _ in range(32)]
    np.testing.assert_array_equal(view, values[1:])
    np.testing.assert_array_equal(part.numpy(), values[2])
    assert len(junk) == 32


def test_memory_is_let_go_with_its_last_view(dev):
    tensor = dev.zeros((8,))
    storage = weakref.ref(tensor.storage)
    view = tensor[2:]
    del tensor
    gc.collect()
    assert storage() is not None
    del view
    gc.collect()
    assert storage() is None


def test_operators_do_not_copy_to_the_host_in_silence(dev):
    tensor = dev.zeros((2,))
    with pytest.raises(TypeError):
        _ = tensor + 1


def test_memory_is_aligned_like_that_of_a_gpu(dev):
    for size in (1, 3, 100, 1000):
        tensor = dev.empty(size, "u8")
        assert tensor.ptr % 256 == 0
        assert tensor.layout.alignment == 256
    assert dev.empty(9, "f32")[1:].layout.alignment == 4


def test_layouts_are_shared_by_equal_views(dev):
    assert dev.zeros((2, 3)).layout is dev.zeros((2, 3)).layout
    assert dev.zeros((2, 3)).layout is not dev.zeros((2, 3), "f16").layout
    assert dev.zeros((2, 4))[:, ::2].layout is dev.zeros((2, 4))[:, ::2].layout


def test_the_bounds_of_a_view_in_bytes(dev):
    whole = dev.zeros((4, 6))
    assert (whole.layout.low, whole.layout.high) == (0, 96)
    assert (whole[::-1].layout.low, whole[::-1].layout.high) == (-72, 24)
    assert (whole[1:3, 2:4].layout.low, whole[1:3, 2:4].layout.high) == (0, 32)
    assert (whole[:0].layout.low, whole[:0].layout.high) == (0, 0)


def test_copy_from_checks_the_shape_and_converts(dev):
    tensor = dev.zeros((2, 2), "bf16")
    assert tensor.copy_from(np.eye(2)) is tensor
    assert tensor.numpy().dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensor.numpy().astype(float), np.eye(2))
    with pytest.raises(BadRequest) as caught:
        tensor.copy_from(np.zeros((2, 3)))
    assert caught.value.operand == "source"


def test_item_is_the_only_element(dev):
    assert dev.array([[2.5]]).item() == 2.5
    with pytest.raises(ValueError, match=r"."):
        dev.zeros((2,)).item()


@pytest.mark.parametrize("shape", [(-1,), (2.0,), ("3",), (True,)])
def test_a_shape_is_whole_numbers_of_0_or_more(dev, shape):
    with pytest.raises(BadRequest) as caught:
        dev.empty(shape)
    assert caught.value.operand == "shape"


def test_an_unknown_dtype_is_refused_with_the_choices(dev):
    with pytest.raises(BadRequest, match="bf16"):
        dev.empty((2,), "f31")


def test_names_of_dtypes_count_bits_and_e4m3_ends_at_464(dev):
    assert [dev.zeros(1, name).numpy().dtype for name in ("i8", "u8", "i64")] == [np.int8, np.uint8, np.int64]
    rounded = dev.array([448, 464, -464, 465, 1e9], "f8e4m3").numpy().astype(float)
    np.testing.assert_array_equal(rounded, [448, 448, -448, np.nan, np.nan])


def test_packed_4_bit_elements_are_two_to_a_byte(dev):
    values = np.array([[0, 0.5, 1], [1.5, -2, 6]]).astype(ml_dtypes.float4_e2m1fn)
    tensor = dev.array(values)
    assert tensor.nbytes == 3
    np.testing.assert_array_equal(tensor.numpy().astype(float), values.astype(float))
    np.testing.assert_array_equal(np.asarray(tensor).astype(float), values.astype(float))
    with pytest.raises(BadRequest, match="dense"):
        tensor.T.numpy()
    with pytest.raises(BadRequest, match="whole bytes"):
        dev.view(tensor)


# -- generations --------------------------------------------------------------------------------------------------
def test_a_tensor_of_a_closed_device_is_stale_everywhere(dev):
    tensor = dev.zeros((4, 4))
    dev.close()
    for use in (
        tensor.numpy,
        tensor.item,
        lambda: np.asarray(tensor),
        lambda: tensor.copy_from(np.zeros((4, 4))),
        tensor.__dlpack__,
        lambda: dispatch.matmul(tensor, tensor),
        lambda: dev.zeros((1,)),
        dev.synchronize,
    ):
        with pytest.raises(StaleTensor, match="closed"):
            use()
    assert "stale" in repr(tensor)


def test_the_next_device_is_another_generation(dev):
    old = dev.zeros((2, 2))
    dev.close()
    dev.close()  # a second time does nothing
    new = dispatch.device("host")
    assert new is not dev
    assert new.generation > dev.generation
    assert new.zeros((2, 2)).generation == new.generation
    with pytest.raises(StaleTensor):
        dispatch.matmul(new.zeros((2, 2)), old)
    np.testing.assert_array_equal(dispatch.matmul(new.zeros((2, 2)), new.zeros((2, 2))).numpy(), np.zeros((2, 2)))


def test_a_device_is_one_object_until_it_is_closed(dev):
    assert dispatch.device("host") is dev
    assert str(dev) == "host"
    assert dev.is_host
    assert dev.zeros(3).dtype is F32


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "", "host:1"])
def test_an_unknown_device_says_what_there_is(name):
    with pytest.raises(DeviceUnavailable, match=r"cuda:0.*host"):
        dispatch.device(name)


def test_a_gpu_that_has_no_memory_left_for_a_context_is_unavailable_for_that_reason(monkeypatch):
    from cudabind.errors import CudaDriverError
    from dispatch.device import registry

    def opened(_number, _generation):
        raise CudaDriverError("cuda", "cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")

    monkeypatch.setattr(registry, "CudaDevice", opened)
    with pytest.raises(DeviceUnavailable, match=r"cuda:98 .*cuDevicePrimaryCtxRetain failed with .*out of memory"):
        dispatch.device("cuda:98")
    assert "cuda:98" not in [device.name for device in registry.live_devices()]


def test_a_layout_says_whether_its_elements_meet(dev, rng):
    """Against a count of all addresses, for drawn shapes and strides of up to four axes."""
    seen = set()
    for _ in range(2000):
        rank = int(rng.integers(1, 5))
        shape = tuple(int(n) for n in rng.integers(0 if rng.random() < 0.05 else 1, 5, rank))
        strides = tuple(int(n) for n in rng.integers(-8, 30, rank))
        places = np.array([sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)])
        layout = dev.layout(F32, shape, strides, 1 << 20)
        assert layout.meets_itself == (len(np.unique(places)) < len(places)), layout
        seen.add(layout.meets_itself)
    assert seen == {True, False}


def test_nothing_is_written_to_a_view_whose_elements_share_memory(dev):
    memory = np.zeros(10, np.float32)
    windows = dispatch.from_dlpack(np.lib.stride_tricks.as_strided(memory, (4, 4), (8, 4)))
    wanted = "elements that have different addresses|dense rows or columns"
    with pytest.raises(BadRequest, match=wanted):
        windows.copy_from(np.ones((4, 4), np.float32))
    one = dev.array(np.eye(4, dtype=np.float32))
    for call in (
        lambda: dispatch.matmul(one, one, out=windows),
        lambda: dispatch.softmax(one, out=windows),
        lambda: dispatch.conv_fwd(one[None, None], one[None, None, :1, :1], out=windows[None, None]),
    ):
        with pytest.raises(BadRequest, match=wanted):
            call()
    assert not memory.any()
