"""Views of every kind beside NumPy's: what is written through one changes its elements and no other byte.

tests/gpu/test_views.py runs the same on a GPU. The two 4-bit elements of a byte are the hard case: a view that begins
in the middle of one is refused, and one that ends there leaves the other half alone.
"""

import contextlib
import ctypes
import math

import numpy as np
import pytest

import dispatch
from dispatch.device.host import HostDevice
from dispatch.device.strided_copy import pieces
from dispatch.errors import BadIndex, BadRequest, StaleTensor
from dispatch.supervise.process.shared_device import make_shared_device

DTYPES = ("f32", "bf16", "i8", "f8e4m3", "bool", "c64", "f4e2m1", "f4e2m1")
COUNT = 1500


@contextlib.contextmanager
def opened(name):
    """A device of a name, "shared host" for one whose memory children map."""
    kind, _, rest = name.partition(" ")
    device = make_shared_device(rest) if kind == "shared" else dispatch.device(name)
    yield device
    if kind == "shared":
        device.close()


def some(rng, choices):
    return choices[int(rng.integers(len(choices)))]


def a_slice(rng, extent):
    low, high = sorted(int(n) for n in rng.integers(0, extent + 1, 2))
    step = some(rng, (1, 1, 1, 2, 3, -1, -2))
    return slice(low, high, step) if step > 0 else slice(high - 1 if high else None, None, step)


def step(rng, shape):
    """One view, as a function of an array or of a tensor."""
    kind = int(rng.integers(5))
    if kind == 0 and len(shape) > 1:
        axes = tuple(int(axis) for axis in rng.permutation(len(shape)))
        return lambda x: x.transpose(axes)
    if kind == 1:
        return lambda x: x.T
    if kind == 2 and len(shape) > 1 and 0 not in shape:
        merged = (shape[0] * shape[1], *shape[2:])
        return lambda x: x.reshape(merged)
    if kind == 3:
        return lambda x: x[None]
    index = tuple(a_slice(rng, n) if rng.integers(4) else int(rng.integers(n)) if n else slice(None) for n in shape)
    return lambda x: x[(*index, ...)]


def start(view, whole):
    """At which element of the memory a view begins, whatever its elements take up there."""
    return (view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]) // whole.itemsize


def is_dense(view):
    return view.flags.c_contiguous or view.size == 0


def values(rng, shape, dtype):
    kind = dispatch.keys.Dtype.by_name[dtype].numpy
    return rng.integers(0, 2 if dtype == "bool" else 7, shape).astype(np.float32).astype(kind)


def a_view(rng, tensor, model):
    """The same random view of a tensor and of its model; None where it has to be refused, and is."""
    whole = model
    packed = tensor.dtype.bits < 8
    for _ in range(int(rng.integers(4))):
        make = step(rng, model.shape)
        wanted = make(model)
        if not np.shares_memory(wanted, whole) and wanted.size:  # NumPy's reshape has copied
            with pytest.raises(BadRequest, match="view of"):
                make(tensor)
            return None
        if packed and wanted.size and (start(wanted, whole) - start(model, whole)) % 2:
            with pytest.raises(BadRequest, match="whole bytes"):
                make(tensor)
            return None
        tensor, model = make(tensor), wanted
    return tensor, model


def write(device, rng, tensor, model):
    """Write through a view in one way or another, to both; False where that has to be refused, and is."""
    kind = some(rng, ("zero", "zero", "copy", "async"))
    new = np.zeros_like(model) if kind == "zero" else values(rng, model.shape, tensor.dtype.name)
    if kind == "zero":
        action = lambda: device.fill_zero(tensor)  # noqa: E731
    elif kind == "copy":
        action = lambda: tensor.copy_from(new)  # noqa: E731
    else:
        action = lambda: tensor.copy_from_async(new).result()  # noqa: E731
    if tensor.dtype.bits < 8 and not is_dense(model) and not (kind == "zero" and tensor.layout.fills_bytes):
        with pytest.raises(BadRequest, match="dense"):
            action()
        return False
    action()
    model[...] = new
    return True


def views(name, rng, count=COUNT):
    """So many random writes through random views, each compared with all of the memory; how many were made."""
    written = 0
    with opened(name) as device:
        for number in range(count):
            shape = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(1, 4))))
            dtype = some(rng, DTYPES)
            model = values(rng, shape, dtype)
            tensor = device.array(model)
            seen = a_view(rng, tensor, model)
            if seen is None:
                continue
            view, part = seen
            written += write(device, rng, view, part)
            np.testing.assert_array_equal(tensor.numpy(), model, err_msg=f"number {number}, {dtype}{shape}, {view}")
            if view.dtype.bits == 8 or is_dense(part):
                np.testing.assert_array_equal(view.numpy(), part)
    return written


def refusals(name):
    """What may not be written is refused by name, and left as it was."""
    with opened(name) as device:
        ones = device.array(np.ones((4, 6), np.float32))
        layout = device.layout(ones.dtype, (4, 6), (6, 1), ones.ptr, readonly=True)
        readonly = dispatch.Tensor(ones.storage, ones.ptr, layout)
        broadcast = dispatch.Tensor(ones.storage, ones.ptr, device.layout(ones.dtype, (4, 6), (0, 1), ones.ptr))
        other = HostDevice(generation=1 << 20)
        elsewhere = other.array(np.ones((4, 6), np.float32))
        for tensor, words in (
            (readonly, "read-only"),
            (broadcast, "elements that have different addresses"),
            (elsewhere, "one on"),
        ):
            with pytest.raises(BadRequest, match=words):
                device.fill_zero(tensor)
            with pytest.raises(BadRequest, match=words):
                device.copy_in(tensor, np.zeros((4, 6), np.float32))
        for tensor in (readonly, broadcast):
            for change in (tensor.copy_from, tensor.copy_from_async):
                with pytest.raises(BadRequest):
                    change(np.zeros((4, 6)))
        for array in (np.zeros((4, 7), np.float32), np.zeros((4, 6)), np.zeros((), np.float32)):
            with pytest.raises(BadRequest, match="array"):
                device.copy_in(ones, array)  # it would be read, or written, beyond its end
        for tensor in (ones, elsewhere):
            np.testing.assert_array_equal(tensor.numpy(), np.ones((4, 6)))
        other.close()
        for change in (device.fill_zero, lambda gone: device.copy_in(gone, np.zeros((4, 6), np.float32))):
            with pytest.raises(StaleTensor):
                change(elsewhere)


@pytest.mark.parametrize("name", ["host", "shared host"])
def test_what_is_written_through_a_view_changes_its_elements_alone(name, rng):
    assert views(name, rng) > COUNT // 2


@pytest.mark.parametrize("name", ["host", "shared host"])
def test_what_may_not_be_written_is_refused(name):
    refusals(name)


def test_a_view_that_begins_in_the_middle_of_a_byte_is_refused_and_says_what_to_do():
    tensor = dispatch.device("host").array(np.arange(6, dtype=np.float32), "f4e2m1")
    for index in (1, slice(1, None), slice(3, 4), slice(None, None, -1), -1):
        with pytest.raises(BadRequest, match=r"expected whole bytes.*begin at an even element"):
            tensor[index]
    assert tensor[2].item() == 2
    np.testing.assert_array_equal(tensor[2:4].numpy().astype(int), [2, 3])
    assert tensor[1:1].size == 0


def test_half_a_byte_at_the_end_of_a_view_leaves_the_other_half():
    tensor = dispatch.device("host").array(np.array([0.5, 1, 1.5, 2, 3, 4], np.float32), "f4e2m1")
    tensor[0:1].copy_from(np.array([6], np.float32))
    dispatch.device("host").fill_zero(tensor[2:5])
    np.testing.assert_array_equal(tensor.numpy().astype(float), [6, 1, 0, 0, 0, 4])


@pytest.mark.parametrize(
    ("shape", "strides", "bits", "fills"),
    [
        ((4, 6), (6, 1), "f32", True),
        ((4, 6), (1, 4), "f32", True),
        ((4, 6), (-6, -1), "f32", True),
        ((4, 6), (12, 1), "f32", False),
        ((4, 6), (6, 2), "f32", False),
        ((3, 3), (2, 2), "f32", False),
        ((2, 2), (3, 0), "f32", False),
        ((0, 3), (7, 5), "f32", True),
        ((), (), "f32", True),
        ((3,), (1,), "f4e2m1", False),
        ((4,), (1,), "f4e2m1", True),
    ],
)
def test_a_layout_knows_whether_it_fills_its_bytes(shape, strides, bits, fills):
    device = dispatch.device("host")
    kind = dispatch.keys.Dtype.by_name[bits]
    assert device.layout(kind, shape, strides, 256).fills_bytes is fills


def test_an_index_beyond_the_end_ends_an_iteration():
    tensor = dispatch.device("host").array(np.arange(6).reshape(2, 3))
    assert [row.numpy().tolist() for row in tensor] == [[0, 1, 2], [3, 4, 5]]
    for index in (2, -3, (0, 3), 2**70):
        with pytest.raises(BadIndex) as caught:
            tensor[index]
        assert isinstance(caught.value, IndexError)
    for index in ((0, 0, 0), (..., ...), slice(None, None, 0), slice("a"), (None,) * 70):
        with pytest.raises(BadRequest) as refused:
            tensor[index]
        assert not isinstance(refused.value, IndexError)
    with pytest.raises(TypeError):
        len(tensor[0, 0])
    with pytest.raises(BadRequest):
        list(tensor[0, 0])


def test_the_size_of_a_layout_is_exact():
    layout = dispatch.device("host").layout(dispatch.keys.F32, (2**31, 2**31, 4), (2**33, 4, 1), 256)
    assert layout.size == math.prod((2**31, 2**31, 4)) == 2**64


def copied(tensor, array, into):
    """Copy as a GPU would, piece by piece: what the driver's copies of rows at a pitch do, and what they refuse."""
    for ptr, part, pitch in pieces(tensor, array):
        dense = np.ascontiguousarray(part)
        rows, width = (dense.shape[0], dense.shape[1] * dense.itemsize) if pitch else (1, dense.nbytes)
        assert pitch >= width or not pitch, "CUDA_ERROR_INVALID_VALUE"
        for row in range(rows):
            here, there = ptr + row * pitch, dense.ctypes.data + row * width
            ctypes.memmove(*((here, there) if into else (there, here)), width)
        if not into:
            part[...] = dense.reshape(part.shape)


def test_the_pieces_that_a_gpu_copies_are_the_view(rng):
    device, seen = dispatch.device("host"), 0
    for _ in range(3000):
        shape = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(1, 5))))
        model = values(rng, shape, "f32")
        made = a_view(rng, device.array(model), model)
        if made is None:
            continue
        tensor, part = made
        got = np.empty(part.shape, np.float32)
        copied(tensor, got, into=False)
        np.testing.assert_array_equal(got, part)
        new = rng.standard_normal(part.shape).astype(np.float32)
        copied(tensor, new, into=True)
        np.testing.assert_array_equal(tensor.numpy(), new)
        seen += 1
    assert seen > 1500


def test_windows_that_overlap_are_copied_out_element_by_element():
    line = np.arange(10, dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(line, 3)
    got = np.empty(windows.shape, np.float32)
    copied(dispatch.from_dlpack(windows), got, into=False)
    np.testing.assert_array_equal(got, windows)


@pytest.mark.parametrize("strides", [(4, 1, 1), (4, 2, 1), (4, 100, 1), (4, -1, 1), (4, 0, 1)])
def test_an_axis_of_one_element_is_no_pitch(strides):
    whole = dispatch.device("host").array(np.arange(12, dtype=np.float32).reshape(3, 4))
    layout = whole.device.layout(whole.dtype, (3, 1, 3), strides, whole.ptr)
    got = np.empty((3, 1, 3), np.float32)
    copied(dispatch.Tensor(whole.storage, whole.ptr, layout), got, into=False)
    np.testing.assert_array_equal(got[:, 0], whole.numpy()[:, :3])


def test_zeros_behind_half_a_byte_are_refused():
    """A view that steps back from an even element to an odd one: its first byte and its last have a neighbour each."""
    with opened("host") as device:
        tensor = device.array(values(np.random.default_rng(0), (10,), "f4e2m1"))
        before = tensor.numpy()
        with pytest.raises(BadRequest, match="dense"):
            device.fill_zero(tensor[8:4:-1])
        np.testing.assert_array_equal(tensor.numpy(), before)
        device.fill_zero(tensor[4:8])
        np.testing.assert_array_equal(tensor.numpy()[4:8], np.zeros(4))


def test_a_copy_of_a_backward_view_steps_forward(run, monkeypatch):
    """Only then do other libraries take it, to which a refusal of strides below 0 says copy()."""
    monkeypatch.setattr(dispatch.Tensor, "_through_host", lambda self, kind: self.device.empty(self.shape, kind))

    def work(dev):
        whole = dev.empty((4, 6))
        for view, strides in ((whole, (6, 1)), (whole.T, (1, 6)), (whole[::-1], (6, 1)), (whole.T[::-1], (4, 1))):
            assert view.copy().layout.strides == strides

    run(work)
