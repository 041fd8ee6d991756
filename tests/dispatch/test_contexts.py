"""The current CUDA context, with one GPU and with two: calls are made in the right one, and it stays what it was.

A stand-in for the driver (stand_in.py) keeps each thread's stack of contexts and refuses what the driver refused on two
H200s.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dispatch.bind import refit
from dispatch.device.cuda import CudaDevice
from dispatch.device.storage import Storage
from dispatch.device.stream import Stream
from dispatch.keys import F32

DEFAULTS = [0, 1, 2]
SHAPE = (5, 7)


@pytest.fixture
def thread():
    """Run a function on a thread of its own, which has no context, no executors and no streams."""

    def run(work, *arguments):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work, *arguments).result()

    return run


@pytest.fixture(params=[1, 2], ids=["one GPU", "two GPUs"])
def driver(request, stand_in):
    return stand_in(request.param)


def do_everything(dev):
    """All that a device and its executors do without a library."""
    values = np.arange(35, dtype=np.float32).reshape(SHAPE)
    tensor, zeros = dev.array(values), dev.zeros(SHAPE)
    assert np.array_equal(tensor.numpy(), values)
    assert not zeros.numpy().any()
    source = dev.pinned(SHAPE)
    source[...] = values
    assert np.array_equal(zeros.copy_from_async(source).result().numpy_async().result(), values)
    here = dev.executor()
    for view in (tensor, tensor[::-1], tensor[:, ::-2], tensor[1:, 2:], tensor[:0], dev.array(3.5)):
        copy = here.clone(view)
        assert np.array_equal(copy.numpy(), view.numpy())
        assert copy.layout is view.layout, "a plan is found by the layout"
    assert here.scalar(2.0, F32)
    assert here.zeros(64)
    other = dev.stream()
    other.wait_for(here.stream)
    other.close()
    dev.synchronize()
    assert "MiB are free" in dev.memory()


def use_a_default_stream(driver, dev, handle):
    """Memory on another library's default stream: made, used on ours as well, kept, and freed."""
    ours = dev.executor().stream
    theirs = Stream.from_handle(dev, handle)
    with theirs:
        tensor = dev.array(np.ones(SHAPE, np.float32))
        assert tensor.numpy().all()
        assert tensor.numpy_async().result().all()
        dev.zeros(SHAPE)  # freed there
    for state in (driver.busy, driver.captured):
        state.add(int(dev.context.handle))
    assert not theirs.done()
    assert theirs.is_capturing()
    dev.park(Storage(dev, tensor.ptr, 0, theirs, lambda _: None, [tensor]))  # as if it were another library's
    for state in (driver.busy, driver.captured):
        state.clear()
    assert theirs.done()
    assert not theirs.is_capturing()
    tensor.storage.use(ours, write=True)
    theirs.wait_for(ours)
    theirs.synchronize()
    ours.precede_handle(theirs.c_handle)
    tensor.storage.lend(theirs)
    size = len(driver.memory)
    holder = [tensor]
    del tensor
    nobody = threading.Thread(target=holder.clear)  # no context is current there, and none has to be
    nobody.start()
    nobody.join()
    with theirs:
        dev.bytes_in_use()
    assert len(driver.memory) == size - 1


def test_a_thread_gets_the_context_of_the_first_device_it_uses_and_keeps_it(driver, thread):
    def work():
        devices = [CudaDevice(number, 1) for number in range(len(driver.contexts))]
        assert driver.stack == driver.contexts[:1]
        for dev in (*devices, *reversed(devices)):
            do_everything(dev)
            assert driver.stack == driver.contexts[:1]

        def elsewhere():
            assert devices[-1].array(np.ones(3)).numpy().all()
            assert driver.stack == driver.contexts[-1:]
            do_everything(devices[0])
            assert driver.stack == driver.contexts[-1:]

        thread(elsewhere)

    thread(work)


def test_the_choice_of_another_library_stays(driver, thread):
    def work():
        devices = [CudaDevice(number, 1) for number in range(len(driver.contexts))]
        for chosen in driver.contexts:
            driver.cuCtxSetCurrent(chosen)
            for dev in devices:
                do_everything(dev)
                assert driver.stack == [chosen]

    thread(work)


@pytest.mark.parametrize("handle", DEFAULTS)
def test_default_streams_are_those_of_their_device(driver, thread, handle):
    def work():
        devices = [CudaDevice(number, 1) for number in range(len(driver.contexts))]
        for chosen in driver.contexts:
            driver.cuCtxSetCurrent(chosen)
            for dev in devices:
                use_a_default_stream(driver, dev, handle)
                assert driver.stack == [chosen]

    thread(work)


def test_a_recorded_call_on_a_default_stream_is_launched_in_its_context(driver, thread):
    def work():
        dev = [CudaDevice(number, 1) for number in range(len(driver.contexts))][-1]
        with Stream.from_handle(dev, 0):
            recorded = dev.executor().capture(lambda: None)
        driver.cuCtxSetCurrent(driver.contexts[0])
        assert recorded.launch() == 0
        assert driver.launched == driver.contexts[-1:]
        assert driver.stack == driver.contexts[:1]

    thread(work)


def test_a_copy_between_tensors_and_a_refit_find_the_memory_of_their_device(driver, thread):
    def work():
        dev = [CudaDevice(number, 1) for number in range(len(driver.contexts))][-1]
        driver.cuCtxSetCurrent(driver.contexts[0])
        target, source = dev.zeros(SHAPE), dev.array(np.ones(SHAPE, np.float32))

        class Request:
            def tensors(self):
                return [("b", target, False)]

        refit.refit(dev.executor(), Request(), {"b": source})
        assert target.numpy().all()
        refit.refit(dev.executor(), Request(), {"b": np.zeros(SHAPE, np.float32)})
        assert not target.numpy().any()
        assert driver.stack == driver.contexts[:1]

    thread(work)
