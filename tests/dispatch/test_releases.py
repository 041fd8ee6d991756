"""Memory is let go of in order, and without a handle that is gone, beside streams of other libraries.

The stand-in for the driver knows what is behind what. It notes handles that are touched when their stream is gone,
memory that is freed before its uses are done, and captures that are ended.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from dispatch.device import dlpack
from dispatch.device.cuda import CudaDevice
from dispatch.device.device import MAX_EXECUTORS
from dispatch.device.stream import Stream, current

spec = importlib.util.spec_from_file_location("lent_and_borrowed", Path(__file__).with_name("lent_and_borrowed.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
SHAPE, lend, borrow, Gone = memory.SHAPE, memory.lend, memory.borrow, memory.Gone


@pytest.mark.parametrize("reused", [False, True])
def test_memory_used_on_a_stream_that_is_gone(driver, run, reused):
    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle):
            one, other = dev.zeros(SHAPE), dev.zeros(SHAPE)
        driver.end_theirs(handle)
        if reused:
            driver.begin_theirs(handle)
            with Stream.from_handle(dev, handle):
                dev.fill_zero(other)  # behind its use on the first stream of that handle
        else:
            dev.fill_zero(other)  # on ours
        del one, other
        size = len(driver.memory)
        dev.bytes_in_use()
        assert len(driver.memory) == size - 2

    run(work)


def test_what_is_used_on_streams_in_turn_is_behind_each_of_them(driver, run):
    def work(dev):
        handles = [driver.begin_theirs() for _ in range(3)]
        tensor = dev.zeros(SHAPE)
        for handle in (*handles, *handles):
            with Stream.from_handle(dev, handle):
                copy = dev.executor().clone(tensor)
                dev.fill_zero(copy)
        for handle in handles:
            driver.end_theirs(handle)
        dev.fill_zero(tensor)
        clock = driver.clock(dev.executor().stream.c_handle.value)
        assert len(clock) >= 3, "the writer is behind the readers"
        del tensor, copy
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


@pytest.mark.parametrize("count", [1, 2])
def test_a_default_stream_waits_for_a_stream_that_is_gone_in_the_context_of_its_device(stand_in, count):
    driver = stand_in(count)

    def work():
        devices = [CudaDevice(number, 1) for number in range(count)]
        dev = devices[-1]
        handle = driver.begin_theirs(context=driver.contexts[-1])
        with Stream.from_handle(dev, handle):
            tensor = dev.zeros(SHAPE)
        driver.end_theirs(handle)
        driver.cuCtxSetCurrent(driver.contexts[0])
        with Stream.from_handle(dev, 0):
            dev.fill_zero(tensor)
        assert driver.stack == driver.contexts[:1]
        del tensor
        dev.bytes_in_use()
        assert not driver.memory

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert (driver.touched, driver.early, driver.lost) == ([], [], [])


def test_memory_goes_back_on_the_thread_that_destroys_streams(driver, run):
    """Another one could be about to use a handle as that destroys its stream."""

    def work(dev):
        gone = Gone()
        stream = dev.stream()
        with stream:
            tensor = borrow(dev, gone.holder())
            dev.fill_zero(tensor)
        executor = dev.executor()
        dev.releases._collecting.acquire()  # another thread is about it
        before = dict(driver.events)
        del tensor
        assert driver.events == before
        dev.releases._collecting.release()
        stream.close()
        executor.stream.synchronize()
        dev.bytes_in_use()
        dev.bytes_in_use()
        assert gone.is_back

    run(work)


def test_other_libraries_memory_goes_back_once_our_streams_are_done(driver, run):
    def work(dev):
        driver.is_slow = True
        handle = driver.begin_theirs()
        for on_theirs in (False, True):
            gone = Gone()
            if on_theirs:
                with Stream.from_handle(dev, handle) as theirs:
                    tensor = borrow(dev, gone.holder())
                    dev.fill_zero(tensor)
                driver.end_theirs(handle)
            else:
                tensor = borrow(dev, gone.holder())
                dev.fill_zero(tensor)
            del tensor
            dev.bytes_in_use()
            assert not gone.is_back, "a stream of ours still uses it"
            if on_theirs:
                theirs.finish_uses()
            else:
                dev.executor().stream.synchronize()
            dev.bytes_in_use()
            assert gone.is_back

    run(work)


def test_nothing_is_waited_for_as_memory_dies(driver, run, monkeypatch):
    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle):
            used = dev.zeros(SHAPE)
        lent = lend(dev.zeros(SHAPE), handle)
        seen = dev.zeros(SHAPE)
        dlpack.cuda_array_interface(seen)
        with monkeypatch.context() as patch:
            for name in ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxRecordEvent"):
                patch.setattr(getattr(driver, name), "carry_out", None)  # cannot be called
            lent.clear()
            del used, seen
            gc.collect()
            dev.bytes_in_use()

    run(work)


def test_executors_on_streams_that_are_closed_are_forgotten(run):
    def work(dev):
        for _ in range(20):
            stream = dev.stream()
            with stream:
                dev.zeros(SHAPE)
            stream.close()
        assert len(current.executors) <= 2

    run(work)


def test_a_block_that_cannot_be_entered_leaves_nothing_behind(driver, run, monkeypatch):
    def work(dev):
        handle = driver.begin_theirs()
        dev.executor()
        with monkeypatch.context() as patch:
            patch.setattr(CudaDevice, "open_executor", None)
            for stream in (dev.stream(), Stream.from_handle(dev, handle)):
                with pytest.raises(TypeError), stream:
                    pass
        assert not current.entered
        assert not Stream.from_handle(dev, handle).is_alive

    run(work)


def test_a_stream_that_dies_inside_of_its_block_is_not_taken_for_alive_ever_after(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        stream = Stream.from_handle(dev, handle)
        with pytest.raises(AssertionError, match="is gone"), stream:
            driver.end_theirs(handle)
        assert not stream.is_alive
        driver.touched.clear()

    run(work)


def test_executors_on_streams_that_come_and_go_are_few(driver, run):
    def work(dev):
        for _ in range(60):
            with Stream.from_handle(dev, driver.begin_theirs()):
                dev.executor()
        assert len(current.executors) <= 18

    run(work)


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_copy_from_the_host_has_read_another_librarys_page_locked_memory(driver, run, is_locked):
    """Its array may be written, or its memory used again, as soon as the call returns."""

    def work(dev):
        driver.is_slow = True
        memory = (ctypes.c_uint8 * 128)()
        if is_locked:
            driver.locked.append(memory)
        array = np.frombuffer(memory, np.float32)
        dev.array(array)
        is_done = driver.done(driver.clock(dev.executor().stream.c_handle.value))
        assert is_done == is_locked, "of other memory the driver has made a copy"

    run(work)


def test_streams_that_are_dropped_unclosed_go_with_their_executors(run):
    def work(dev):
        home, kept = dev.executor(), dev.stream()
        streams = []
        for number in range(3 * MAX_EXECUTORS):
            stream = dev.stream()
            streams.append(weakref.ref(stream))
            with stream:
                x = dev.array(np.full(SHAPE, number, np.float32))
                assert (x.numpy() == number).all()
            del stream, x
            with kept:
                assert not dev.zeros(SHAPE).numpy().any()
        gc.collect()
        assert sum(stream() is not None for stream in streams) <= MAX_EXECUTORS
        assert len(dev.executors()) <= MAX_EXECUTORS + 2
        assert dev.executor() is home

    run(work)


def test_a_driver_without_identities_and_events_of_a_context_does_as_well(driver, run):
    from cudabind.errors import SymbolNotFound

    class Missing:
        @property
        def unchecked(self):
            raise SymbolNotFound("cuda", "it", text="not there", hint="none")

    driver.cuStreamGetId = driver.cuCtxRecordEvent = Missing()

    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle):
            tensor = dev.zeros(SHAPE)
        driver.end_theirs(handle)
        driver.begin_theirs(handle)
        with Stream.from_handle(dev, handle):
            dev.fill_zero(tensor)
        dev.synchronize()
        del tensor
        dev.bytes_in_use()
        assert not driver.memory

    run(work)
