"""What is closed while something still refers to it: streams, their executors, and devices.

No handle is used when it is gone. The stand-in for the driver notes handles that are touched when their stream is gone.
"""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.cuda import CudaDevice
from dispatch.device.dlpack import _lend
from dispatch.device.external_memory import _hand_back
from dispatch.device.storage import Storage
from dispatch.device.stream import current
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed, StaleTensor
from dispatch.supervise.cuda_worker import CudaWorker
from dispatch.supervise.process.chunks import file_chunk
from dispatch.supervise.process.shared_device import SharedCuda

PATIENCE = 120  # seconds, on a machine that has other things to do
SHAPE = (4, 8)


class Shared(SharedCuda):
    """A GPU's memory that children map, out of the host's: of the driver's own the stand-in has none."""

    def __init__(self):
        CudaDevice.__init__(self, 0, 1)
        self._init_memory()

    def _make_chunk(self, nbytes):
        return file_chunk(nbytes)


# -- streams --------------------------------------------------------------------------------------------------------
def test_a_thread_whose_current_stream_was_closed_goes_on_on_its_own(driver, run):
    def work(dev):
        stream = dev.stream()
        executor = dev.executor(stream)
        assert current.executor is executor, "as in a worker's thread"
        stream.close()
        dev.bytes_in_use()
        assert stream.c_handle.value not in driver.streams
        assert not dev.zeros(SHAPE).numpy().any()
        assert current.executor is dev.executor() is not executor

    run(work)


@pytest.mark.parametrize("is_shared", [False, True])
def test_in_a_block_of_a_stream_that_was_closed_nothing_is_enqueued(run, is_shared):
    def work(dev):
        dev = Shared() if is_shared else dev
        kept = dev.empty(SHAPE)
        with dev.stream() as stream:
            stream.close()
            dev.releases.collect()
            with pytest.raises(Closed):
                dev.empty(SHAPE)
            with pytest.raises(Closed):
                kept.numpy()
        assert dev.executor().stream is not stream

    run(work)


def test_a_thread_that_copied_on_a_stream_copies_on_another_once_that_is_closed(run):
    def work(_):
        dev = Shared()
        with dev.stream() as stream:
            dev.empty(SHAPE)
        assert dev.executor().stream is stream, "the thread had none of its own"
        stream.close()
        assert not dev.executor().stream.closed

    run(work)


def test_the_hosts_only_stream_cannot_be_closed():
    dev = dp.device("host")
    stream = dev.stream()
    stream.close()
    with dev.stream():
        assert not dev.zeros(SHAPE).numpy().any()


@pytest.mark.parametrize("order", ["use", "lend", "show", "follow"])
def test_a_stream_that_is_closed_while_another_thread_orders_work_behind_it(driver, run, order):
    def work(dev):
        dev.executor()
        stream, event = dev.stream(), dev.event
        with stream:
            x = dev.zeros(SHAPE)

        def close():
            stream.close()
            dev.bytes_in_use()

        def event_later():  # the stream was found open, and its handle is about to be named
            with ThreadPoolExecutor(1) as other:
                other.submit(close).result()
            return event()

        dev.event = event_later
        if order == "use":
            dev.fill_zero(x)
        elif order == "lend":
            _lend(x, driver.begin_theirs())
        elif order == "follow":
            own, other = (
                SimpleNamespace(executor=SimpleNamespace(stream=one)) for one in (dev.executor().stream, stream)
            )
            CudaWorker._order_after(own, SimpleNamespace(worker=other))
        else:
            assert x.__cuda_array_interface__["data"][0] == x.ptr
        del dev.event
        assert stream.closed
        dev.bytes_in_use()
        assert stream.c_handle.value not in driver.streams

    run(work)


# -- devices --------------------------------------------------------------------------------------------------------
def test_a_device_that_is_closed_beside_a_capture_is_closed_by_the_next_call(driver, run, monkeypatch):
    def work(dev):
        released, destroyed = [], []
        monkeypatch.setattr(driver, "_cuDevicePrimaryCtxRelease", lambda one: (0, released.append(one)), raising=False)
        monkeypatch.setattr(driver, "_cuMemPoolDestroy", lambda one: (0, destroyed.append(one)), raising=False)
        dev.zeros(SHAPE)
        handle = driver.begin_theirs()
        driver.begin_capture(handle)
        with pytest.raises(BadRequest, match="after the capture has ended"):
            dev.close()
        with pytest.raises(StaleTensor):
            dev.zeros(SHAPE)
        driver.end_capture(handle)
        assert (released, destroyed) == ([], [])
        dev.close()
        dev.close()
        assert (released, destroyed) == ([0], [dev._pool.handle])

    run(work, may_lose=True)  # the wait of a device that closes ends captures


def test_a_device_is_closed_once_by_two_threads(driver, run, monkeypatch):
    def work(dev):
        destroyed, both = [], threading.Barrier(2)
        monkeypatch.setattr(driver, "_cuMemPoolDestroy", lambda one: (0, destroyed.append(one)), raising=False)

        class Supervisor:
            def finish(self):  # both threads have found the device open
                both.wait(PATIENCE)

        supervisor = Supervisor()
        dev.supervisors.add(supervisor)
        with ThreadPoolExecutor(2) as pool:
            for one in [pool.submit(dev.close) for _ in range(2)]:
                one.result()
        assert destroyed == [dev._pool.handle]

    run(work)


def test_streams_of_a_closed_device_are_destroyed_before_its_context_goes(driver, run, monkeypatch):
    def work(dev):
        context, late = [True], []
        destroy = driver._cuStreamDestroy

        def destroyed(handle):
            if not context:
                late.append(handle)
            return destroy(handle)

        monkeypatch.setattr(driver, "_cuStreamDestroy", destroyed)
        monkeypatch.setattr(driver, "_cuDevicePrimaryCtxRelease", lambda _: (0, context.clear()), raising=False)
        stream = dev.stream()
        with stream:
            x = dev.zeros(SHAPE)
        assert dev.executor().capture(lambda: None) is not None  # has a recorder
        dev.close()
        assert not context
        assert not driver.streams
        stream.synchronize()
        stream.close()
        del stream, x, dev
        current.executors.clear()
        current.own_streams.clear()
        current.executor = None
        gc.collect()
        assert not late

    run(work)


def test_what_copies_and_other_libraries_wait_for_goes_back_as_the_device_is_closed(driver, run, monkeypatch):
    def work(dev):
        released = []
        monkeypatch.setattr(driver, "_cuDevicePrimaryCtxRelease", lambda one: (0, released.append(one)), raising=False)
        driver.is_slow = True

        class Lender:
            pass

        lender = Lender()
        gone, memory = weakref.ref(lender), dev.empty(SHAPE)
        storage = Storage(dev, memory.ptr, 0, dev.executor().stream, _hand_back, (memory, lender))
        borrowed = Tensor(storage, memory.ptr, memory.layout)
        dev.fill_zero(borrowed)
        dev.empty(SHAPE).copy_from_async(np.ones(SHAPE, np.float32))  # from memory of the pool, which nobody waits for
        del lender, memory, storage, borrowed
        assert gone() is not None
        dev.close()
        assert gone() is None
        assert released == [0]

    run(work)


@pytest.mark.usefixtures("driver")
def test_a_thread_keeps_no_device_that_was_closed():
    gone = []

    def work():
        for generation in range(4):
            dev = CudaDevice(0, generation)
            dev.zeros(SHAPE)
            gone.append(weakref.ref(dev))
            dev.close()
            del dev
        CudaDevice(0, 4).zeros(SHAPE)
        gc.collect()
        assert [dev() for dev in gone] == [None] * 4

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
