"""Streams by other libraries' objects, torch's current one, and a device for a block; the driver is a stand-in."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import dispatch as dp
from dispatch.device.cuda import CudaDevice
from dispatch.device.host import HostDevice
from dispatch.device.stream import current
from dispatch.errors import BadRequest, StaleTensor


class Protocol:
    """A stream with the protocol alone."""

    def __init__(self, handle, version=0):
        self.pair = (version, handle)

    def __cuda_stream__(self):
        return self.pair


def as_torch_has_it(handle, number):
    return SimpleNamespace(cuda_stream=handle, device_index=number)


def as_cupy_has_it(handle, number):
    return SimpleNamespace(ptr=handle, device_id=number)


def as_cuda_core_has_it(handle, number):
    stream = Protocol(handle)
    stream.device = SimpleNamespace(device_id=number)
    return stream


def as_an_early_cuda_core_had_it(handle, number):
    return SimpleNamespace(__cuda_stream__=(0, handle), device=SimpleNamespace(device_id=number))


OBJECTS = (as_torch_has_it, as_cupy_has_it, as_cuda_core_has_it, as_an_early_cuda_core_had_it)


@pytest.fixture
def on_gpus(stand_in):
    """Run a function on a thread of its own, with the driver and two devices that `device()` gives."""

    def run(work):
        driver = stand_in(2)

        def whole():
            devices = [CudaDevice(number, 1) for number in range(2)]
            dp.Device.live |= {dev.name: dev for dev in devices}
            try:
                work(driver, *devices)
            finally:
                for dev in devices:
                    dev.close()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(whole).result()
        gc.collect()  # while the driver is there
        assert not driver.touched

    return run


@pytest.mark.parametrize("made", OBJECTS, ids=lambda made: made.__name__)
def test_an_object_is_the_stream_of_its_handle_on_its_device(on_gpus, made):
    def work(driver, _, dev):
        handle = driver.begin_theirs(context=driver.contexts[1])
        theirs = made(handle, 1)
        stream = dp.Stream(theirs)
        assert stream is dp.Stream(theirs) is dp.Stream(stream) is dp.Stream.from_handle(dev, handle)
        assert isinstance(stream, dp.Stream)
        assert (stream.device, stream.c_handle.value) == (dev, handle)
        with dp.Stream(theirs) as inside:
            assert inside is stream
            assert current.executor.stream is stream
            tensor = dev.zeros(4)
            assert tensor.storage.owner is stream
        assert current.executor is None or current.executor.stream is not stream
        del tensor

    on_gpus(work)


def test_an_object_that_names_no_device_is_of_the_current_one_or_of_that_which_is_given(on_gpus):
    def work(driver, first, second):
        handles = [driver.begin_theirs(context=context) for context in driver.contexts[:2]]
        assert dp.Stream(Protocol(handles[0])).device is first
        assert dp.Stream(as_cupy_has_it(0, -1)).device is first
        assert dp.Stream(Protocol(handles[1]), second).device is second
        assert dp.Stream(Protocol(handles[1]), "cuda:1").device is second
        assert dp.Stream(handles[1], device=second).device is second
        with second:
            assert dp.Stream(Protocol(handles[1])).device is second

    on_gpus(work)


def test_an_object_is_kept_as_long_as_its_stream(on_gpus):
    def work(driver, dev, _):
        theirs = Protocol(driver.begin_theirs())
        seen = weakref.ref(theirs)
        with dp.Stream(theirs):
            del theirs
            gc.collect()
            assert seen() is not None
            tensor = dev.zeros(4)
        assert seen() is not None, "its memory goes behind it"
        del tensor
        current.executors.clear()
        gc.collect()

    on_gpus(work)


class Raising:
    def __cuda_stream__(self):
        raise ValueError("it is closed")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *((one, "expected a stream of torch") for one in (None, "x", 1.5, True, object(), SimpleNamespace(ptr="x"))),
        (SimpleNamespace(__cuda_stream__=3), "expected a stream of torch"),
        (Raising(), "ValueError: it is closed"),
        (Protocol(7, version=1), "version 1 of __cuda_stream__; expected version 0"),
        (Protocol(-1), "expected a cudaStream_t as an integer"),
        (-1, "expected a cudaStream_t as an integer"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,  # a repr has an address in it
)
def test_what_is_no_stream_is_refused(wrong, said):
    with pytest.raises(BadRequest, match=said):
        dp.Stream(wrong, dp.device("host"))


def test_a_device_chooses_its_current_stream_for_a_block(on_gpus):
    def work(_, first, second):
        before = first.executor()
        assert current.executor is before
        with second as inside:
            assert inside is second
            assert current.executor.stream.device is second
            assert current.executor is second.executor()
            side = first.stream()
            with side, first:
                assert current.executor.stream is side
            with first:
                assert current.executor is before
            assert current.executor is second.executor()
            with pytest.raises(KeyError), first:
                raise KeyError
            assert current.executor is second.executor()
        assert current.executor is before
        assert not current.entered

    on_gpus(work)


def test_a_block_of_the_host_and_of_a_closed_device():
    def work():
        host = HostDevice(1 << 20)
        with host:
            assert current.executor.stream is host.stream()
            assert dp.matmul(host.zeros((2, 2)), host.zeros((2, 2))).shape == (2, 2)
        assert not current.entered
        assert current.executor is None
        host.close()
        with pytest.raises(StaleTensor), host:
            pass
        assert not current.entered

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_torch_s_current_stream(on_gpus, monkeypatch):
    torch = pytest.importorskip("torch")

    def work(driver, first, second):
        handles = {dev.ordinal: driver.begin_theirs(context=driver.contexts[dev.ordinal]) for dev in (first, second)}
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", handles.get, raising=False)
        numbered = {0: (5, 0, 1), 1: (handles[1], 1, 1)}  # torch's own; another's, which has its handle for a number
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", numbered.get, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        with dp.use_torch_stream() as stream:
            assert (stream.device, stream.c_handle.value) == (second, handles[1])
            assert current.executor.stream is stream
            assert not stream.lasting
        torch_s_own = dp.use_torch_stream("cuda:0")
        assert torch_s_own.c_handle.value == handles[0]
        assert torch_s_own.lasting
        assert torch_s_own.is_alive, "at any time"
        with first:
            assert dp.use_torch_stream().device is first
            assert dp.use_torch_stream(second).device is second

    on_gpus(work)


def test_without_a_gpu_torch_s_stream_is_the_host_s():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with dp.use_torch_stream() as stream:
        assert stream is dp.device("host").stream()
