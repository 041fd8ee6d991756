"""DLPack on the host: NumPy, and torch where it is installed, both ways and without a copy."""

import ctypes
import gc
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

import dispatch
from dispatch.device import dlpack
from dispatch.errors import BadRequest, StaleTensor

SHARED = ["f64", "f32", "f16", "i8", "u8", "i32", "u32", "i64", "u64", "bool", "c64", "c128"]


@pytest.fixture
def dev():
    return dispatch.device("host")


class OldProducer:
    """A producer from before DLPack 1.0: it takes no max_version."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Producer:
    """A producer that is no NumPy array, as of DLPack 1.0."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("name", SHARED)
def test_numpy_takes_a_tensor_without_a_copy(dev, rng, name):
    tensor = dev.array(rng.integers(0, 2, (3, 4)), name)
    taken = np.from_dlpack(tensor)
    assert taken.ctypes.data == tensor.ptr
    assert (taken.shape, taken.strides, taken.dtype) == (tensor.shape, tensor.strides, tensor.dtype.numpy)
    np.testing.assert_array_equal(taken, tensor.numpy())


@pytest.mark.parametrize("source", [lambda x: x, Producer, OldProducer])
@pytest.mark.parametrize("name", SHARED)
def test_an_array_is_taken_without_a_copy(rng, name, source):
    values = rng.integers(0, 2, (3, 4)).astype(dispatch.Dtype.of(name).numpy)
    tensor = dispatch.from_dlpack(source(values))
    assert tensor.ptr == values.ctypes.data
    assert (tensor.shape, tensor.strides, tensor.dtype) == (values.shape, values.strides, name)
    np.asarray(tensor)[1, 2] = 1
    assert values[1, 2] == 1


@pytest.mark.parametrize("cut", [
    lambda x: x.T, lambda x: x[1:], lambda x: x[:, ::2], lambda x: x[::-1], lambda x: x[:0], lambda x: x[0, :1],
])  # fmt: skip
def test_views_keep_their_strides_both_ways(dev, rng, cut):
    values = rng.standard_normal((4, 6))
    view = cut(values)
    tensor = dispatch.from_dlpack(Producer(view) if view.size else view)
    assert tensor.shape == view.shape
    np.testing.assert_array_equal(tensor.numpy(), view)
    lent = cut(dev.array(values))
    np.testing.assert_array_equal(dispatch.from_dlpack(lent).numpy(), view)
    np.testing.assert_array_equal(np.from_dlpack(lent) if min(lent.strides) > 0 else np.asarray(lent), view)


def test_strides_below_0_are_for_ourselves_alone(dev):
    """torch ends the process where it is given some."""
    turned = dev.array(np.arange(6.0).reshape(2, 3))[:, ::-1]
    for consume in (np.from_dlpack, lambda x: x.__dlpack__(), lambda x: x.__dlpack__(max_version=(1, 0))):
        with pytest.raises(BufferError, match=r"negative strides, which f64\[2, 3\] .* has: copy it with x\.copy\(\)"):
            consume(turned)
    torch = pytest.importorskip("torch")
    with pytest.raises(BufferError, match=r"x\.copy\(\)"):
        torch.from_dlpack(turned)
    assert torch.from_dlpack(turned.copy()).tolist() == [[2, 1, 0], [5, 4, 3]]
    for sound in (turned[:, 1:2], turned[:, :0]):  # one element of an axis, or none
        assert torch.from_dlpack(sound).tolist() == sound.tolist()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_ml_dtypes_arrays_are_taken_though_numpy_gives_no_capsule(name):
    values = np.ones((2, 3), getattr(ml_dtypes, name))
    tensor = dispatch.from_dlpack(values)
    assert tensor.ptr == values.ctypes.data
    assert tensor.dtype == values.dtype


def test_a_read_only_array_gives_a_read_only_tensor():
    values = np.ones((2, 2))
    values.flags.writeable = False
    speaks = np.lib.NumpyVersion(np.__version__) >= "2.1.0"  # version 1.0 of DLPack, which can say so
    for source in (values, Producer(values)) if speaks else (values,):
        tensor = dispatch.from_dlpack(source)
        assert tensor.layout.readonly
        assert not np.asarray(tensor).flags.writeable
        with pytest.raises(BufferError, match="read-only"):
            tensor.__dlpack__()
        if speaks:
            assert not np.from_dlpack(tensor).flags.writeable
        else:
            with pytest.raises(BufferError, match="read-only"):
                np.from_dlpack(tensor)


def test_the_producer_lives_as_long_as_the_tensor():
    values = np.ones((5,))
    gone = weakref.ref(values)
    tensor = dispatch.from_dlpack(values)
    view = tensor[1:]
    del values, tensor
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("version", [None, (1, 1)])
def test_a_lent_tensor_lives_as_long_as_its_borrower(dev, taken, version):
    tensor = dev.zeros((5,))
    storage = weakref.ref(tensor.storage)
    borrower = tensor.__dlpack__(max_version=version)
    if taken:
        borrower = dispatch.from_dlpack(Given(borrower))
    del tensor
    gc.collect()
    assert storage() is not None
    del borrower
    gc.collect()
    assert storage() is None


class Given:
    """A producer of the host with a capsule that is there already."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack__(self, **_options):
        return self.capsule

    def __dlpack_device__(self):
        return (1, 0)


# Calls of consumers in which what they borrowed dies while an exception is on its way.
FAILING = [
    ("numpy", ZeroDivisionError, lambda np, x: np.add(np.from_dlpack(x), 1 / 0)),
    ("numpy", ValueError, lambda np, x: np.from_dlpack(x).reshape(7, 7)),
    ("numpy", ValueError, lambda np, x: np.shares_memory(np.from_dlpack(x), 5, max_work="x")),
    ("torch", TypeError, lambda torch, x: torch.add(torch.from_dlpack(x), "x")),
    ("torch", RuntimeError, lambda torch, x: torch.from_dlpack(x) @ torch.zeros(3, 3)),
]


@pytest.mark.parametrize(("library", "error", "call"), FAILING)
def test_an_error_beside_a_borrower_stays_as_it_is_and_the_memory_comes_back(dev, library, error, call):
    consumer = pytest.importorskip(library, reason=f"{library} is not installed")
    tensor = dev.zeros((4, 4))
    storage = weakref.ref(tensor.storage)
    with pytest.raises(error) as raised:
        call(consumer, tensor)
    assert raised.value.__cause__ is None
    del tensor, raised
    gc.collect()
    assert storage() is None


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_memory_comes_back_where_memory_is_made_or_counted(isolation):
    """A loop that only lends makes nothing that the garbage collector would be called for."""
    with dispatch.Supervisor("host", streams=1, isolation=isolation) as sup:
        kept = [np.from_dlpack(sup.device.zeros((4,))) for _ in range(64)]  # are looked at, too: eight at a time
        gc.disable()
        try:
            lost = []
            for _ in range(256):
                tensor = sup.device.zeros((4,))
                lost.append(weakref.ref(tensor.storage))
                np.from_dlpack(tensor)
                del tensor
            assert sum(storage() is not None for storage in lost) <= len(dlpack.exported) // 8 + 1
            if isolation == "process":
                before = sup.device.bytes_in_use()
                kept.pop()
                assert sup.device.bytes_in_use() < before
        finally:
            gc.enable()
        assert all(not array.any() for array in kept)
    sup.device.close()


def test_a_borrower_may_let_go_on_a_thread_that_python_does_not_know(dev):
    """And with neither the interpreter's lock nor Python: the deleter is a function of C that marks the struct."""
    tensor = dev.zeros((5,))
    storage = weakref.ref(tensor.storage)
    capsule = tensor.__dlpack__(max_version=(1, 1))
    managed = dlpack.DLManagedTensorVersioned.from_address(
        dlpack.capsule_pointer(capsule, dlpack.DLManagedTensorVersioned.capsule)
    )
    dlpack.capsule_rename(capsule, dlpack.DLManagedTensorVersioned.used)
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    started = libc.pthread_create(
        ctypes.byref(thread), None, ctypes.c_void_p(managed.deleter), ctypes.c_void_p(ctypes.addressof(managed))
    )
    assert started == 0
    assert libc.pthread_join(thread, None) == 0
    del tensor, capsule
    gc.collect()
    assert storage() is None


LEAVE = """
import atexit, sys
import numpy, dispatch
library = __import__(sys.argv[1])
atexit.register(lambda: kept.append(library.from_dlpack(tensor)))  # behind what dispatch does at exit
tensor = dispatch.device("host").zeros((4, 4))
kept = sys.kept = [library.from_dlpack(dispatch.device("host").zeros((4, 4))) for _ in range(3)]
print("leaving")
"""


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_process_ends_well_with_lent_memory(library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    ran = subprocess.run([sys.executable, "-c", LEAVE, library], capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stdout.strip(), ran.stderr) == (0, "leaving", "")


def test_a_round_trip_is_the_same_memory(dev):
    tensor = dev.zeros((3, 3))
    again = dispatch.from_dlpack(tensor)
    assert (again.ptr, again.layout) == (tensor.ptr, tensor.layout)
    assert dispatch.from_dlpack(np.from_dlpack(tensor)).ptr == tensor.ptr


def test_a_capsule_is_taken_once(dev):
    class Same:
        def __init__(self, tensor):
            self.capsule = tensor.__dlpack__(max_version=(1, 1))

        def __dlpack__(self, **_):
            return self.capsule

        def __dlpack_device__(self):
            return (1, 0)

    source = Same(dev.zeros((2,)))
    assert dispatch.from_dlpack(source).shape == (2,)
    with pytest.raises(BadRequest, match="an unused DLPack capsule"):
        dispatch.from_dlpack(source)


def test_what_cannot_be_given_is_a_buffer_error(dev):
    tensor = dev.zeros((2, 2))
    for options in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError):
            tensor.__dlpack__(max_version=(1, 1), **options)
    with pytest.raises(BufferError, match="packed"):
        dev.zeros((2, 2), "f4e2m1").__dlpack__()
    assert tensor.__dlpack_device__() == (1, 0)


@pytest.mark.parametrize("source", [[1.0, 2.0], 3, None, "text"])
def test_what_is_no_array_is_refused_with_a_hint(source):
    with pytest.raises(BadRequest) as caught:
        dispatch.from_dlpack(source)
    assert caught.value.operand == "from_dlpack"
    assert caught.value.hint


def test_a_dtype_or_device_without_a_place_is_refused():
    with pytest.raises(BadRequest, match="type code"):
        dispatch.from_dlpack(np.ones(3, np.int16))

    class Elsewhere(Producer):
        def __dlpack_device__(self):
            return (10, 0)  # ROCm

    with pytest.raises(BadRequest, match="device type 10"):
        dispatch.from_dlpack(Elsewhere(np.ones(3)))


def test_four_bit_elements_of_a_byte_each_are_refused_for_ours_are_packed():
    values = np.array([1, 2, 3, 4], np.float32).astype(ml_dtypes.float4_e2m1fn)
    with pytest.raises(BadRequest, match="f4e2m1 with one element in each byte"):
        dispatch.from_dlpack(values)


def test_the_host_has_no_cuda_array_interface(dev):
    assert not hasattr(dev.zeros((2,)), "__cuda_array_interface__")
    with pytest.raises(BadRequest):
        dispatch.from_cuda_array_interface(dev.zeros((2,)))


def test_a_stale_tensor_is_not_lent(dev):
    tensor = dev.zeros((2,))
    dev.close()
    with pytest.raises(StaleTensor):
        np.from_dlpack(tensor)


def test_products_of_taken_arrays_land_in_the_producers_memory(rng):
    a, b, out = rng.standard_normal((4, 5)), rng.standard_normal((5, 6)), np.empty((4, 6))
    taken = [dispatch.from_dlpack(array) for array in (a, b.T.copy().T, out)]
    dispatch.matmul(taken[0], taken[1], out=taken[2])
    np.testing.assert_allclose(out, np.einsum("ik,kj->ij", a, b), rtol=1e-13)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64", "bool", "complex64", "float8_e4m3fn"])
def test_torch_on_the_cpu_both_ways(name):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source = torch.ones((3, 4)).to(getattr(torch, name)).T
    tensor = dispatch.from_dlpack(source)
    assert (tensor.ptr, tensor.shape) == (source.data_ptr(), (4, 3))
    assert tuple(stride * source.element_size() for stride in source.stride()) == tensor.strides
    back = torch.from_dlpack(tensor)
    assert (back.data_ptr(), back.dtype, back.stride()) == (source.data_ptr(), source.dtype, source.stride())


@pytest.mark.parametrize(
    ("asked", "name"),
    [(None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned"), ((2, 0), "dltensor_versioned")],
)
def test_a_consumer_is_given_the_struct_that_it_knows(asked, name):
    """One of before DLPack 1.0 knows no version; a later one is told it, and refuses what it does not read."""
    capsule = dispatch.device("host").zeros((2, 3)).__dlpack__(max_version=asked)
    assert f'"{name}"' in repr(capsule)
