"""Wrong arguments of tensors, streams, supervisors and kernels: errors of this library that say what was expected."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import CudaError
from dispatch.device import external_memory, gpus
from dispatch.errors import BadRequest, BadRow, BadType, Closed, DispatchError, OutOfMemory, StaleTensor

PATIENCE = 60  # seconds, on a machine that has other things to do
FAR = 1 << 43  # elements of a view whose copy no machine has memory for


@pytest.fixture
def x():
    return dp.device("host").array(np.arange(6, dtype=np.float32).reshape(2, 3))


# -- tensors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(-7,), ((-2, 3),), (-1, -1), (None,), ("6",), (2.0, 3)])
def test_an_extent_that_is_none_is_refused(x, shape):
    with pytest.raises(BadRequest, match=r"^shape: got .*; expected a view of f32\[2, 3\]"):
        x.reshape(*shape)


@pytest.mark.parametrize(("shape", "made"), [((-1,), (6,)), ((3, -1), (3, 2)), (([3, 2],), (3, 2)), ((), None)])
def test_one_extent_may_be_left_out(x, shape, made):
    if made is None:
        assert dp.device("host").zeros(1).reshape(*shape).shape == ()
        return
    assert x.reshape(*shape).shape == made
    assert x.reshape(np.array(6)).shape == (6,)
    assert x.reshape(np.array([3, 2])).shape == (3, 2)


@pytest.mark.parametrize("strides", [None, 3])
def test_strides_that_are_none_are_refused(x, strides):
    with pytest.raises(BadRequest, match=rf"^element_strides: got {strides}; expected a tuple"):
        x.strided((2, 2), strides)


@pytest.mark.parametrize("named", [{"max_version": "1.0"}, {"max_version": (1,)}, {"dl_device": 3}])
def test_what_dlpack_cannot_be_asked_for_is_refused(x, named):
    (name,) = named
    with pytest.raises(BadRequest, match=rf"^{name}: got .*; expected a tuple of two integers"):
        x.__dlpack__(**named)
    assert np.from_dlpack(x).shape == (2, 3)


def test_a_format_for_a_number_is_refused_for_several_elements(x):
    with pytest.raises(TypeError, match=r"'\.2f' for a Tensor of 6 elements; expected one element") as caught:
        f"{x:.2f}"
    assert isinstance(caught.value, BadType)
    assert f"{x[1, 2]:.2f}" == "5.00"
    assert f"{x:>200}".endswith(str(x))


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("copy", "nbytes"),
    [
        (lambda t: t.numpy(), 4 * FAR),
        (lambda t: t.numpy_async(), 4 * FAR),
        (lambda t: t.copy(), 4 * FAR),
        (lambda t: t.astype("f16"), 4 * FAR),
        (lambda t: np.asarray(t, "f8"), 8 * FAR),
        (np.array, 4 * FAR),
        (lambda t: t.device.pinned(FAR, "f64"), 8 * FAR),
        (lambda t: t.device.pinned((2, FAR)), 8 * FAR),
        (lambda t: t.device.empty(FAR), 4 * FAR + 256),
        (lambda t: t.copy_from(np.broadcast_to(np.float64(1), FAR)), None),
    ],
)
def test_a_copy_that_finds_no_memory_says_how_much_it_needs(copy, nbytes):
    tensor = dp.device("host").zeros(1).strided((FAR,), (0,))
    if nbytes is None:  # it needs a writable tensor
        with pytest.raises(BadRequest, match="different addresses"):
            copy(tensor)
        return
    with pytest.raises(OutOfMemory) as caught:
        copy(tensor)
    assert str(caught.value) == (
        f"the host is out of memory: {nbytes:,} bytes ({nbytes / 2**30:,.1f} GiB) could not be allocated"
    )


LIMITED = """
import resource
import numpy as np
import dispatch as dp

t = dp.device("host").zeros(1 << 26)
rows = np.broadcast_to(np.float64(1), 1 << 26)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
for call in (t.numpy, t.copy, lambda: t.astype("f64"), lambda: t.copy_from(rows), lambda: t.copy_from_async(rows)):
    try:
        call()
    except dp.errors.OutOfMemory as error:
        print(str(error).startswith("the host is out of memory: "), "GiB" in str(error))
"""


def test_copies_under_a_limit_of_memory_raise_out_of_memory():
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ran.stdout.split(), ran.stderr) == (["True", "True"] * 5, "")


# -- streams ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("other", [None, 3])
def test_a_stream_waits_for_streams(other):
    with pytest.raises(BadRequest, match=f"^other: got {other}; expected a Stream"):
        dp.device("host").stream().wait_for(other)


def test_the_device_of_a_handle_is_a_device():
    with pytest.raises(BadRequest, match=r"^device: got 'cuda:0'; expected a Device"):
        dp.Stream.from_handle("cuda:0", 0)


class Lends:
    """What has a handle by the protocol."""

    def __init__(self, handle):
        self.__cuda_stream__ = (0, handle)


@pytest.mark.parametrize("handle", [3, 7, 4095, -1, 1 << 64])
def test_a_number_that_no_stream_has_reaches_no_driver(handle):
    """A driver would read memory there; this device stands for a GPU's, and notes what reaches it."""
    dev = dp.device("host")
    for make in (
        lambda: dp.Stream.from_handle(dev, handle),
        lambda: dp.Stream(handle, dev),
        lambda: dp.Stream(Lends(handle), dev),
        lambda: dp.Stream(SimpleNamespace(ptr=handle), dev),
    ):
        with pytest.raises(BadRequest, match=f"^handle: got {handle}; expected a cudaStream_t as an integer"):
            make()
    for good in (0, 1, 2, 4096, 2**64 - 1):
        assert dp.Stream.from_handle(dev, good) is dev.stream()


def test_a_number_that_no_stream_has_is_refused_from_other_libraries(run, monkeypatch):
    def work(dev):
        tensor = dev.empty(4)
        for make in (lambda: dp.Stream.from_handle(dev, 3), lambda: dp.Stream(Lends(3), dev)):
            with pytest.raises(BadRequest, match=r"^handle: got 3; expected a cudaStream_t"):
                make()
        with pytest.raises(BadRequest, match=r"^stream: got 3; expected a cudaStream_t"):
            tensor.__dlpack__(stream=3)
        interface = {"version": 3, "shape": (4,), "typestr": "<f4", "data": (tensor.ptr, False), "stream": 77}
        lent = SimpleNamespace(__cuda_array_interface__=interface)
        with monkeypatch.context() as patch:
            patch.setattr(external_memory, "device_of_pointer", lambda _: 0)
            patch.setattr(external_memory, "device", lambda _: dev)
            with pytest.raises(BadRequest, match=r"^stream: got 77; expected a cudaStream_t"):
                external_memory.from_cuda_array_interface(lent)

    run(work)


@pytest.mark.parametrize(("status", "error"), [(1, BadRequest), (700, CudaError)])
def test_memory_that_the_driver_does_not_know_is_refused(status, error, monkeypatch):
    def unknown(_attribute, _address):
        raise CudaError("cuda", "cuPointerGetAttribute", status)

    attributes = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL=9)
    driver = SimpleNamespace(CUpointer_attribute=attributes, cuPointerGetAttribute=unknown)
    monkeypatch.setattr(gpus, "driver", driver)
    interface = {"version": 3, "shape": (4,), "typestr": "<f4", "data": (1234567, False)}
    with pytest.raises(error) as found:
        external_memory.from_cuda_array_interface(SimpleNamespace(__cuda_array_interface__=interface))
    if error is BadRequest:
        assert str(found.value) == "data: got address 0x12d687; expected an address of a GPU's memory in this process"


def test_a_closed_stream_has_no_handle(run):
    def work(dev):
        stream = dev.stream()
        assert stream.handle
        stream.close()
        with pytest.raises(Closed, match="was closed"):
            _ = stream.handle
        with pytest.raises(Closed, match="was closed"):
            stream.wait_for(dev.stream())

    run(work)


def test_a_closed_device_makes_no_stream(run):
    def work(dev):
        for one in (dp.device("host"), dev):
            one.close()
            with pytest.raises(StaleTensor, match="was closed"):
                one.stream()

    run(work)


# -- supervisors and kernels ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("requests", [None, 3, "one"])
def test_what_is_no_list_of_requests_is_refused_with_an_error_of_this_library(x, requests):
    given = dp.SoftmaxRequest(x) if requests == "one" else requests
    with dp.Supervisor("host", streams=1) as sup:
        for call in (sup.submit_many, dp.prepare_all):
            with pytest.raises(DispatchError, match=r"^requests: got .*; expected a list") as caught:
                call(given)
            assert isinstance(caught.value, TypeError)


def test_a_callback_is_a_function(x):
    with dp.Supervisor("host", streams=1) as sup:
        future = sup.submit(dp.SoftmaxRequest(x))
        with pytest.raises(BadType, match=r"^callback: got 3, which is not callable; expected a function"):
            future.add_done_callback(3)


@pytest.mark.parametrize("priority", [None, "", (), 2, -2])
def test_a_priority_is_one_of_three_numbers(x, priority):
    with dp.Supervisor("host", streams=1) as sup:
        request = dp.SoftmaxRequest(x)
        with pytest.raises(BadRequest, match=r"^priority: got .*; expected -1 or 0 or 1"):
            sup.submit(request, priority=priority)
        with pytest.raises(BadRequest, match=r"^priority: got .*; expected -1 or 0 or 1"):
            sup.submit_many([request], priority=priority)
        assert [sup.submit(request, priority=good).exception(PATIENCE) for good in (-1, 0, 1)] == [None] * 3


def test_whether_to_wait_is_a_bool():
    with dp.Supervisor("host", streams=1) as sup, pytest.raises(BadRequest, match=r"^wait: got 'x'; expected a bool"):
        sup.close(wait="x")


def test_the_block_of_a_closed_supervisor_is_not_entered():
    sup = dp.Supervisor("host", streams=1)
    sup.close()
    with pytest.raises(Closed, match="was closed"), sup:
        pytest.fail("it was entered")


def test_a_journal_that_cannot_be_opened_is_the_systems_error_and_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(FileNotFoundError):
        dp.Supervisor("host", streams=1, journal="/nonexistent/x")
    assert threading.active_count() == before


@pytest.mark.parametrize("name", [3, None])
def test_the_name_of_a_kernel_is_a_string(name):
    with pytest.raises(BadRow, match=f"its source, its name and a function .*: got 'x', {name}, "):
        dp.Kernel("x", name, lambda _: None)
