"""Streams beside a caller's capture: what goes on, what would end the capture and is refused, and what joins it."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dispatch.device import external_memory
from dispatch.device.device import Device
from dispatch.device.external_memory import from_cuda_array_interface
from dispatch.device.stream import Stream, current, order
from dispatch.errors import BadRequest

spec = importlib.util.spec_from_file_location("lent_and_borrowed", Path(__file__).with_name("lent_and_borrowed.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
SHAPE, lend, borrow, Gone = memory.SHAPE, memory.lend, memory.borrow, memory.Gone


def test_one_handle_is_one_stream(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        one = Stream.from_handle(dev, handle)
        assert Stream.from_handle(dev, handle) is one
        assert Stream.from_handle(dev, 1) is Stream.from_handle(dev, 0)
        mine = Stream.from_handle(dev, 2)
        assert Stream.from_handle(dev, 2) is mine
        seen = []
        other = threading.Thread(target=lambda: seen.append(Stream.from_handle(dev, 2)))
        other.start()
        other.join()
        assert seen[0] is not mine, "each thread has its own"
        driver.begin_capture(handle)
        with one:
            tensor = dev.zeros(SHAPE)
            with Stream.from_handle(dev, handle):
                dev.fill_zero(tensor)
        assert driver.end_capture(handle)

    run(work)


def test_everything_else_goes_on_beside_a_callers_capture(driver, run):
    def work(dev):
        handle, lent_to = driver.begin_theirs(), driver.begin_theirs()
        tensor, gone = dev.zeros(SHAPE), Gone()
        number = driver.begin_capture(handle)
        values = np.ones(SHAPE, np.float32)
        assert dev.array(values).numpy().all()
        assert tensor.copy_from_async(values).result().numpy_async().result().all()
        kept = lend(dev.zeros(SHAPE), lent_to)
        driver.use(kept[0].base, lent_to)
        kept.clear()
        with Stream.from_handle(dev, lent_to):
            tensor = borrow(dev, gone.holder())
        dev.stream().close()
        dev.bytes_in_use()
        del tensor
        assert dev.executor().capture(lambda: None) is not None
        gc.collect()
        with Stream.from_handle(dev, handle):
            made = dev.zeros(SHAPE)
            dev.executor().zeros(64)
        assert driver.end_capture(handle), driver.lost
        where = made.ptr
        del made
        dev.bytes_in_use()
        assert where in driver.memory, "the graph has it"
        driver.end_graph(number)
        dev.bytes_in_use()
        dev.bytes_in_use()
        assert where not in driver.memory

    run(work)


@pytest.mark.parametrize(
    "act",
    [
        lambda dev, _: dev.array(np.ones(SHAPE)),
        lambda _, tensor: tensor.copy_from(np.ones(SHAPE)),
        lambda _, tensor: tensor.copy_from_async(np.ones(SHAPE)),
        lambda _, tensor: tensor.numpy(),
        lambda _, tensor: tensor.numpy_async(),
        lambda dev, _: dev.synchronize(),
        lambda dev, _: dev.executor().stream.synchronize(),
        lambda dev, _: dev.trim(),
    ],
)
def test_what_would_end_the_capture_is_refused_by_name(driver, run, act):
    def work(dev):
        tensor = dev.zeros(SHAPE)
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle) as theirs:
            driver.begin_capture(handle)
            with pytest.raises(BadRequest, match="under capture"):
                act(dev, tensor)
            assert not theirs.done()
            assert driver.end_capture(handle)
            act(dev, tensor)

    run(work)


@pytest.mark.parametrize("first", ["stream", "memory"])
def test_garbage_that_holds_a_stream_and_its_memory(driver, run, first):
    def work(dev):
        stream = dev.stream()
        with stream:
            tensor = dev.zeros(SHAPE)
        current.executors.clear()
        ring = [stream, tensor] if first == "stream" else [tensor, stream]
        ring.append(ring)
        handle = stream.c_handle.value
        del stream, tensor, ring
        gc.collect()
        assert handle in driver.streams, "who looks at what died may be about to use it"
        dev.bytes_in_use()
        assert not driver.memory
        assert handle not in driver.streams

    run(work)


def test_a_stream_of_ours_that_waits_for_a_captured_one_goes_into_its_graph(driver, run):
    def work(dev):
        handle, ours = driver.begin_theirs(), dev.stream()
        with ours:
            before = dev.zeros(SHAPE)
        number = driver.begin_capture(handle)
        with Stream.from_handle(dev, handle) as theirs:
            epoch = order.sync_epoch
            ours.wait_for(theirs)
            assert order.sync_epoch > epoch, "what was prepared there looks again"
            with ours:
                made = dev.zeros(SHAPE)
                assert dev.executor().captured
                del before
                dev.bytes_in_use()
            theirs.wait_for(ours)
        assert driver.end_capture(handle)
        del made
        dev.bytes_in_use()
        assert len(driver.memory) == 1
        driver.end_graph(number)
        for _ in range(2):
            dev.bytes_in_use()
        assert not driver.memory

    run(work)


def test_a_recording_ends_no_capture_of_others_whatever_the_library_does(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        driver.begin_capture(handle)
        executor = dev.executor()
        assert executor.capture(lambda: driver.cuEventQuery.unchecked(ctypes.c_void_p(1))) is not None
        assert driver.end_capture(handle)

    run(work)


@pytest.mark.parametrize("captured", ["ours", "theirs"])
def test_an_array_of_another_stream_is_taken_beside_a_capture(driver, run, monkeypatch, captured):
    def work(dev):
        here, there, memory = driver.begin_theirs(), driver.begin_theirs(), dev.zeros(SHAPE)
        face = {"version": 3, "data": (memory.ptr, False), "shape": SHAPE, "typestr": "<f4", "stream": there}
        source = SimpleNamespace(__cuda_array_interface__=face)
        driver.begin_capture(here if captured == "ours" else there)
        with Stream.from_handle(dev, here), monkeypatch.context() as patch:
            patch.setattr(external_memory, "device_of_pointer", lambda _: 0)
            patch.setitem(Device.live, "cuda:0", dev)
            if captured == "ours":  # the host waits for the other
                assert from_cuda_array_interface(source).ptr == memory.ptr
            else:
                with pytest.raises(BadRequest, match="under capture"):
                    from_cuda_array_interface(source)
        assert len(driver.capturing) == 1
        assert driver.end_capture(here if captured == "ours" else there)

    run(work)


def test_no_stream_of_ours_is_drawn_into_a_capture(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        number = driver.begin_capture(handle)
        with Stream.from_handle(dev, handle):
            tensor = dev.zeros(SHAPE)
            with dev.stream(), pytest.raises(BadRequest, match="under capture"):
                dev.fill_zero(tensor)
        dev.fill_zero(tensor)  # nobody says that the stream is alive: what was captured is in no order
        del tensor
        dev.bytes_in_use()
        assert list(driver.capturing) == [handle]
        assert driver.end_capture(handle)
        driver.end_graph(number)
        dev.bytes_in_use()
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


def test_a_stream_that_is_named_again_once_its_capture_has_ended_sees(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle) as theirs:
            tensor = dev.zeros(SHAPE)
            driver.begin_capture(handle)
        assert theirs.unmarked
        with theirs:
            assert driver.end_capture(handle)
        assert not theirs.unmarked
        driver.end_theirs(handle)
        dev.fill_zero(tensor)
        del tensor
        dev.bytes_in_use()
        assert not driver.memory

    run(work)
