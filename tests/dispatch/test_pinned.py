"""Asynchronous copies on the host, where they are done at once, and pinned memory over a stand-in driver."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.device import async_copy, pinned
from dispatch.device.async_copy import Copy
from dispatch.device.cuda import CudaDevice
from dispatch.device.pinned import PinnedPool
from dispatch.device.stream import NOT_READY
from dispatch.errors import BadRequest, OutOfMemory, StaleTensor

MIB = 1 << 20


class Driver:
    """Ordinary memory for page-locked memory, and one event whose status the test sets."""

    def __init__(self):
        self.pages, self.freed, self.status, self.full = {}, [], NOT_READY, False
        self.cuMemHostAlloc = SimpleNamespace(unchecked=self.allocate)
        self.cuMemFreeHost = SimpleNamespace(unchecked=lambda where: self.freed.append(where.value))
        self.cuEventQuery = SimpleNamespace(unchecked_holding_gil=lambda _: self.status)
        self.cuEventSynchronize = SimpleNamespace(unchecked=lambda _: 0)

    def allocate(self, where, nbytes, flags):
        if self.full:
            return 2
        memory = ctypes.create_string_buffer(nbytes.value)
        self.pages[ctypes.addressof(memory)] = memory
        where._obj.value = ctypes.addressof(memory)
        return 0


class Gpu:
    alive = True
    context = nullcontext()

    def __init__(self):
        self.kept, self.recycled = [], []

    def __str__(self):
        return "gpu"

    def recycle(self, event):
        self.recycled.append(event)

    def keep_until(self, event, keep):
        self.kept.append((event, keep))


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(async_copy, "driver", driver)
    monkeypatch.setattr(pinned, "driver", driver)
    yield driver
    gc.collect()  # what a test leaves is freed by this driver, not by the machine's


# -- the pool -----------------------------------------------------------------------------------------------------
def test_arrays_share_pages_and_give_their_memory_back_with_the_last_view(driver):
    pool = PinnedPool(Gpu())
    a, b = pool.array((1000,), np.dtype(np.float32)), pool.array((3, 5), np.dtype(np.complex64))
    a[...], b[...] = 1, 2j
    assert len(driver.pages) == 1
    assert pool.holds(a.ctypes.data)
    assert pool.holds(b.ctypes.data)
    assert not pool.holds(np.empty(4).ctypes.data)
    assert (a == 1).all()
    where, view = a.ctypes.data, a[10:20]
    del a
    gc.collect()
    assert pool.array((1000,), np.dtype(np.float32)).ctypes.data != where
    assert (view == 1).all()
    del view
    gc.collect()
    assert pool.array((1000,), np.dtype(np.float32)).ctypes.data == where


def test_pages_are_freed_when_no_array_is_in_them(driver):
    pool = PinnedPool(Gpu())
    large = pool.array((200 * MIB,), np.dtype(np.uint8))
    small = pool.array((), np.dtype(np.float64))
    pages = [large.ctypes.data, small.ctypes.data]
    assert pool.in_use
    del large
    pool.trim()
    assert pages[0] in driver.freed
    assert pages[1] not in driver.freed
    small[...] = 5
    del pool
    assert small == 5, "an array outlives its pool"
    del small
    gc.collect()
    assert pages[1] in driver.freed


def test_memory_that_cannot_be_locked_says_so(driver):
    driver.full = True
    with pytest.raises(OutOfMemory, match="64 MiB of memory for gpu"):
        PinnedPool(Gpu()).array((4,), np.dtype(np.uint8))


# -- a copy under way -----------------------------------------------------------------------------------------------
def test_a_copy_is_done_when_its_event_is(driver):
    gpu, ended = Gpu(), []
    copy = Copy(gpu, "event", "result", "kept", lambda: ended.append(1))
    assert not copy.done()
    assert "under way" in repr(copy)
    with pytest.raises(TimeoutError, match="it continues"):
        copy.result(timeout=0.001)
    driver.status = 0
    assert copy.done()
    assert (copy.result(), copy.result(timeout=0), gpu.recycled, ended) == ("result", "result", ["event"], [1])


@pytest.mark.usefixtures("driver")
def test_a_copy_that_is_waited_for_ends_once():
    gpu, ended = Gpu(), []
    copy = Copy(gpu, "event", "result", None, lambda: ended.append(1))
    assert asyncio.run(awaited(copy)) == "result"
    assert copy.done()
    assert (gpu.recycled, ended) == (["event"], [1])


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize("ask", [Copy.result, Copy.done, lambda copy: copy.result(timeout=10)])
def test_who_waits_beside_another_sees_the_whole_copy(driver, ask):
    """The first to find it ended writes the array; to nobody is it ended before."""
    writing, written = threading.Event(), []

    def finish():
        writing.set()
        time.sleep(0.05)
        written.append(1)

    driver.status = 0
    copy = Copy(Gpu(), "event", "result", None, finish)
    first = threading.Thread(target=copy.result)
    first.start()
    writing.wait()
    assert ask(copy)
    assert written == [1]
    first.join()
    assert copy._device.recycled == ["event"]


async def awaited(copy):
    return await copy


@pytest.mark.usefixtures("driver")
def test_what_a_dropped_copy_reads_and_writes_is_kept_until_it_ends():
    gpu = Gpu()
    Copy(gpu, "event", "result", "kept")
    assert gpu.kept == [("event", ("kept", "result"))]


# -- on the host ----------------------------------------------------------------------------------------------------
def test_copies_on_the_host_are_done_at_once_and_exact(rng):
    host = dp.device("host")
    source = host.pinned((7, 5), "f32")
    source[...] = rng.standard_normal((7, 5))
    x = host.empty((7, 5), "f32")
    copy = x.copy_from_async(source)
    assert copy.done()
    assert copy.result() is x
    back = host.pinned((7, 5), "f32")
    assert x.numpy_async(back).result() is back
    assert np.array_equal(back, source)
    assert np.array_equal(asyncio.run(awaited(x.T.numpy_async())), source.T)
    x.T.copy_from_async(np.arange(35).reshape(5, 7))  # converted
    assert np.array_equal(x.numpy(), np.arange(35).reshape(5, 7).T)


def test_an_array_that_does_not_fit_is_refused():
    x = dp.device("host").zeros((3, 4))
    for out in (np.empty((4, 3), np.float32), np.empty((3, 4)), np.empty((4, 3), np.float32).T):
        with pytest.raises(BadRequest, match=r"C-order array of f32\[3, 4\]"):
            x.numpy_async(out)
    with pytest.raises(BadRequest, match="source"):
        x.copy_from_async(np.zeros(12))


def test_copies_of_a_closed_device_are_refused():
    host = dp.device("host")
    x = host.zeros(3)
    host.close()
    with pytest.raises(StaleTensor):
        x.numpy_async()
    with pytest.raises(StaleTensor):
        x.copy_from_async(np.zeros(3))
    with pytest.raises(StaleTensor):
        host.pinned(3)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("into", [True, False])
def test_a_copy_that_nobody_is_told_of_has_ended(stand_in, monkeypatch, error, into):
    """Its page-locked memory is another array's from then on."""
    driver = stand_in(1)

    def work():
        dev = CudaDevice(0, 1)
        x = dev.array(np.ones((4, 8), np.float32))
        driver.is_slow = True

        def recorded(_):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(dev, "recorded", recorded)
            with pytest.raises(error):
                x.copy_from_async(np.zeros((4, 8), np.float32)) if into else x.numpy_async()
        assert driver.done(driver.clock(dev.executor().stream.c_handle.value))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
