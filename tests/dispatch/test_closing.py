"""What is closed while something still refers to it: streams, their executors, and devices.

No handle is used when it is gone, and no finalizer that comes in between waits for its own thread. The stand-in for the
driver notes handles that are touched when their stream is gone.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.request import Plan
from dispatch.device.cuda import CudaDevice
from dispatch.device.dlpack import _lend
from dispatch.device.external_memory import _hand_back
from dispatch.device.recordings import Recordings
from dispatch.device.storage import Storage
from dispatch.device.stream import Stream, current
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, Closed, StaleTensor
from dispatch.keys import F32
from dispatch.libraries.cublaslt import launched
from dispatch.libraries.handle import StreamHandle
from dispatch.ops.matmul import exact, exact_kernels
from dispatch.supervise.cuda_worker import CudaWorker
from dispatch.supervise.process.chunks import file_chunk
from dispatch.supervise.process.shared_device import SharedCuda

PATIENCE = 120  # seconds, on a machine that has other things to do
SHAPE = (4, 8)


class Shared(SharedCuda):
    """A GPU's memory that children map, out of the host's: of the driver's own the stand-in has none."""

    def __init__(self):
        CudaDevice.__init__(self, 0, 1)
        self._begin()

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
            CudaWorker._follow(own, SimpleNamespace(worker=other))
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
        with pytest.raises(BadRequest, match="once that has ended"):
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


# -- finalizers -----------------------------------------------------------------------------------------------------
def within_patience(work):
    """Run on a thread, which may wait for itself for ever."""
    over = []
    thread = threading.Thread(target=lambda: over.append(work()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert over


def test_a_finalizer_may_record_while_its_thread_waits_for_the_device():
    recordings = Recordings()

    def work():
        with recordings.none(), recordings.one():
            return True

    within_patience(work)
    within_patience(lambda: recordings.none().__enter__() is None)


def test_a_finalizer_may_open_an_executor_while_its_thread_opens_one(run):
    def work(dev):
        class Executors(weakref.WeakSet):
            def add(self, executor):
                if not opened:
                    opened.append(dev.stream())
                    dev.executor(opened[-1])  # as a finalizer would, for the set allocates memory
                super().add(executor)

        opened = []
        dev._executors = Executors()
        within_patience(lambda: dev.zeros(SHAPE))

    run(work)


def test_a_handle_that_a_finalizer_asks_for_while_it_is_made_goes_back_as_well(run):
    class Handle(StreamHandle):
        name, kind, made = "of nobody's library", ctypes.c_void_p, 0

        @staticmethod
        def create(c_handle):
            Handle.made += 1
            c_handle.value = Handle.made
            if Handle.made == 1:
                Handle.of(executors[0])

        @staticmethod
        def destroy(c_handle):
            destroyed.append(c_handle.value)

        @staticmethod
        def set_stream(c_handle, stream):
            followed.append((c_handle.value, stream))

    executors, destroyed, followed = [], [], []

    def work(dev):
        executors.append(dev.executor())
        found = Handle.of(executors[0])
        assert found is Handle.of(executors[0])
        assert found.follow().value == 1
        assert followed == [(2, executors[0].target.value), (1, executors[0].target.value)]
        executors[0].close()
        assert sorted(handle.value for handle, _ in dev.idle[Handle.name]) == [1, 2]
        with dev.stream():
            assert Handle.of(dev.executor()).c_handle.value in (1, 2), "it is lent again, and none is made"
        dev.close()
        assert sorted(destroyed) == [1, 2]

    run(work)


@pytest.mark.parametrize("room", ["exact", "exact_kernels", "launched"])
def test_a_finalizer_may_ask_for_what_its_thread_is_about_to_look_up(run, room):
    def work(dev):
        executor = dev.executor()
        exact_kernels._loaded[dev] = {F32: (None, {})}
        found, ask = {
            "exact": (exact, lambda: exact._shared(executor, 64)),
            "exact_kernels": (exact_kernels, lambda: exact_kernels.functions(executor, F32) == {}),
            "launched": (launched, lambda: launched._recorder(executor)),
        }[room]

        def look():
            with found._lock:
                return ask()

        within_patience(look)

    run(work)


def test_an_executor_that_could_not_be_made_is_none_to_be_closed(run, monkeypatch):
    def work(dev):
        with monkeypatch.context() as patch:
            patch.setattr(dev, "activate", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                dev.executor()
        gc.collect()  # its finalizer finds nothing that it could not close
        assert not dev.executors()

    run(work)


# -- captures -------------------------------------------------------------------------------------------------------
def test_no_use_comes_between_as_a_captured_call_takes_its_operands(driver, run, monkeypatch):
    """It would be forgotten: by who frees the memory, and by who writes it next."""

    def work(dev):
        with dev.stream():
            x = dev.zeros(SHAPE)
        handle, waits = driver.begin_theirs(), Stream.wait_for_uses
        driver.begin_capture(handle)
        could_use = []

        def wait(stream, other):
            with ThreadPoolExecutor(1) as pool:
                could_use.append(pool.submit(Storage.ordering.acquire, blocking=False).result())
            waits(stream, other)

        with Stream.from_handle(dev, handle) as stream, monkeypatch.context() as patch:
            patch.setattr(Stream, "wait_for_uses", wait)
            patch.setattr(Plan, "enqueue", lambda *_: None)
            dev.executor().enqueue(Plan(None, capture_safe=True), (), (x,), ())
        assert could_use == [False]
        assert x.storage.owner is stream

    run(work)


@pytest.mark.parametrize("how", ["a call", "a look at its kernels"])
def test_ctrl_c_as_a_recording_begins_leaves_none_under_way(driver, run, monkeypatch, how):
    """The signal came during the driver's call: Python raises it as that returns, before its status is stored."""

    def work(dev):
        executor, begin = dev.executor(), driver.cuStreamBeginCapture

        def interrupted(*given):
            begin.unchecked_holding_gil(*given)
            raise KeyboardInterrupt

        target = executor.target.value
        with monkeypatch.context() as patch:
            patch.setattr(launched, "driver", driver)
            patch.setattr(driver, "cuStreamBeginCapture", SimpleNamespace(unchecked_holding_gil=interrupted))
            with pytest.raises(KeyboardInterrupt):
                executor.capture(lambda: None) if how == "a call" else launched.kernels(executor, lambda: 0)
        assert not driver.capturing
        assert executor.target.value == target
        gc.collect()
        dev.zeros(SHAPE)
        assert not driver.capturing, "nor has a stream gone into one that is never ended"
        assert executor.capture(lambda: None) is not None

    run(work)
