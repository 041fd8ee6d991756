"""Finalizers, interrupts and other threads that come in between: none waits for its own thread or leaves a handle."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dispatch.core.request import Plan
from dispatch.device.recordings import Recordings
from dispatch.device.storage import Storage
from dispatch.device.stream import Stream
from dispatch.keys import F32
from dispatch.libraries.cublaslt import kernel_recording
from dispatch.libraries.handle import StreamHandle
from dispatch.ops.matmul import exact_kernels

PATIENCE = 120  # seconds, on a machine that has other things to do
SHAPE = (4, 8)


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
        with recordings.exclude(), recordings.record():
            return True

    within_patience(work)
    within_patience(lambda: recordings.exclude().__enter__() is None)


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


@pytest.mark.parametrize("room", ["exact_kernels", "kernel_recording"])
def test_a_finalizer_may_ask_for_what_its_thread_is_about_to_look_up(run, room):
    def work(dev):
        executor = dev.executor()
        exact_kernels._loaded.get(dev, F32, lambda: (None, {}))
        found, ask = {
            "exact_kernels": (exact_kernels._loaded, lambda: exact_kernels.functions(executor, F32) == {}),
            "kernel_recording": (kernel_recording, lambda: kernel_recording._recorder(executor)),
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
            patch.setattr(kernel_recording, "driver", driver)
            patch.setattr(driver, "cuStreamBeginCapture", SimpleNamespace(unchecked_holding_gil=interrupted))
            with pytest.raises(KeyboardInterrupt):
                executor.capture(lambda: None) if how == "a call" else kernel_recording.kernels(executor, lambda: 0)
        assert not driver.capturing
        assert executor.target.value == target
        gc.collect()
        dev.zeros(SHAPE)
        assert not driver.capturing, "nor has a stream gone into one that is never ended"
        assert executor.capture(lambda: None) is not None

    run(work)
