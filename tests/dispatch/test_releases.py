"""Memory let go of beside streams of other libraries and captures: in order, and without a handle that is gone.

The stand-in for the driver knows what is behind what. It notes handles that are touched when their stream is gone,
memory that is freed before its uses are done, and captures that are ended.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import linecache
import random
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

from dispatch.bind.refit import refit
from dispatch.core.request import Plan
from dispatch.device import callers_graph, dlpack, external_memory
from dispatch.device import recordings as recordings_module
from dispatch.device.cuda import CudaDevice
from dispatch.device.device import MAX_EXECUTORS, Device
from dispatch.device.external_memory import _hand_back, from_cuda_array_interface
from dispatch.device.recordings import Recordings
from dispatch.device.storage import Storage
from dispatch.device.stream import Stream, current, order, relaxed
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest
from dispatch.execute.cuda_graph import TRIES
from dispatch.keys import F32
from dispatch.supervise.process.chunks import file_chunk
from dispatch.supervise.process.shared_device import SharedCuda

PATIENCE = 120  # seconds, on a machine that has other things to do
SHAPE = (4, 8)


def lend(tensor, handle):
    """Give a tensor to a consumer on a stream; returns what the consumer holds."""
    dlpack._lend(tensor, handle)
    return [tensor.storage]


def borrow(dev, keep):
    """A tensor over memory of another library, on the current stream."""
    memory = dev.empty(SHAPE)
    storage = Storage(dev, memory.ptr, 0, dev.executor().stream, _hand_back, (memory, keep))
    return Tensor(storage, memory.ptr, memory.layout)


class Gone:
    """Says when it is given back."""

    def __init__(self):
        self.is_back = False

    def holder(self):
        outer = self

        class Holder:
            def __del__(self):
                outer.is_back = True

        return Holder()


# -- streams that are gone ----------------------------------------------------------------------------------------
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


def test_lent_memory_is_held_until_its_stream_is_named_again(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        kept = lend(dev.zeros(SHAPE), handle)
        driver.use(kept[0].base, handle)
        kept.clear()
        dev.bytes_in_use()
        assert len(driver.memory) == 1, "nobody says that the stream is alive"
        with Stream.from_handle(dev, handle):
            dev.bytes_in_use()
        assert not driver.memory
        again = dev.zeros(SHAPE)
        kept = lend(again, handle)
        del again
        driver.use(kept[0].base, handle)
        kept.clear()
        dev.bytes_in_use()
        lend(dev.zeros(SHAPE), handle)  # names it, too
        dev.bytes_in_use()
        assert len(driver.memory) == 1

    run(work)


def test_memory_lent_without_a_stream_waits_for_the_device(driver, run):
    """With stream=-1 the consumer says that it orders its work itself, and on which streams it says to nobody."""

    def work(dev):
        tensor = dev.zeros(SHAPE)
        handle = driver.begin_theirs()
        taken = dlpack.Taken(tensor.__dlpack__(stream=-1, max_version=(1, 1)))
        driver.use(taken.ptr, handle)
        del tensor, taken
        dev.bytes_in_use()
        assert len(driver.memory) == 1
        dev.synchronize()
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


class Shared(SharedCuda):
    """A GPU's memory that children map, out of the host's: of the driver's own the stand-in has none."""

    def __init__(self):
        CudaDevice.__init__(self, 0, 1)
        self._begin()

    def _make_chunk(self, nbytes):
        return file_chunk(nbytes)


def test_shared_memory_that_was_lent_is_no_other_tensors_before_the_consumer_is_done(driver, run):
    def work(_):
        dev = Shared()
        in_use = dev.bytes_in_use
        handle = driver.begin_theirs()
        kept = lend(dev.empty(SHAPE), handle)
        base = kept[0].base
        kept.clear()
        others = [dev.empty(SHAPE) for _ in range(3)]
        assert base not in {other.ptr for other in others}, "nobody says that the consumer is done with it"
        assert in_use() == 4 * 512
        with Stream.from_handle(dev, handle):
            pass
        others.append(dev.empty(SHAPE))
        others.append(dev.empty(SHAPE))
        assert base in {other.ptr for other in others}
        others.clear()
        kept = lend(dev.empty(SHAPE), handle)
        driver.end_theirs(handle)
        kept.clear()
        dev.empty(SHAPE)
        assert in_use() >= 512
        dev.trim()
        dev.synchronize()
        dev.trim()
        assert (in_use(), len(dev.chunks)) == (0, 0)
        kept = lend(dev.empty(SHAPE), driver.begin_theirs())
        dev.close()
        kept.clear()
        gc.collect()
        assert in_use() == 0

    run(work)


@pytest.mark.parametrize("reused", [False, True])
def test_lent_memory_whose_stream_is_gone_waits_for_the_device(driver, run, reused):
    def work(dev):
        handle = driver.begin_theirs()
        kept = lend(dev.zeros(SHAPE), handle)
        driver.use(kept[0].base, handle)
        driver.end_theirs(handle)
        if reused:
            driver.begin_theirs(handle)
        kept.clear()
        if reused:
            with Stream.from_handle(dev, handle):
                dev.bytes_in_use()
        dev.bytes_in_use()
        assert len(driver.memory) == 1, "the new stream of that handle says nothing of the first"
        dev.synchronize()
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


def test_memory_lent_twice_to_one_handle_waits_for_the_first_stream_as_well(driver, run):
    def work(dev):
        driver.is_slow = True
        handle = driver.begin_theirs()
        tensor = dev.zeros(SHAPE)
        kept = lend(tensor, handle)
        driver.use(tensor.ptr, handle)
        driver.end_theirs(handle)  # with its work under way
        driver.begin_theirs(handle)
        kept += lend(tensor, handle)
        del tensor
        kept.clear()
        with Stream.from_handle(dev, handle):
            dev.bytes_in_use()
        assert len(driver.memory) == 1
        dev.synchronize()
        assert not driver.memory

    run(work)


def test_two_threads_lend_at_once_and_both_are_waited_for(driver, run):
    def work(dev):
        tensor, handle = dev.zeros(SHAPE), driver.begin_theirs()
        other = Stream.from_handle(dev, handle)
        lending = threading.Thread(target=tensor.storage.lend, args=(other,))

        class Slow:
            @property
            def identity(self):
                lending.start()
                lending.join(0.2)
                return 0

        slow = Slow()
        tensor.storage.lend(slow)
        lending.join()
        assert set(tensor.storage.lent) == {slow, other}
        tensor.storage.lent = None

    run(work)


def test_streams_that_memory_was_lent_to_are_forgotten_once_the_device_was_waited_for(driver, run):
    def work(dev):
        for _ in range(20):
            handle = driver.begin_theirs()
            lend(dev.zeros(SHAPE), handle).clear()
            driver.end_theirs(handle)
            dev.synchronize()
        assert not driver.memory
        gc.collect()
        assert not dev.externals._known

    run(work)


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


def test_memory_that_was_shown_to_anybody_waits_for_the_device(driver, run):
    def work(dev):
        tensor = dev.zeros(SHAPE)
        face = dlpack.cuda_array_interface(tensor)
        theirs = driver.begin_theirs()
        assert face["stream"] == dev.executor().stream.handle
        driver.use(tensor.ptr, theirs)
        driver.end_theirs(theirs)
        del tensor
        dev.bytes_in_use()
        assert len(driver.memory) == 1
        dev.trim()
        assert not driver.memory

    run(work)


def test_what_is_held_does_not_grow_without_an_end(driver, run):
    def work(dev):
        dev._most_stuck = 1 << 20  # as if the GPU were a small one
        most = 0
        for _ in range(100):
            dlpack.cuda_array_interface(dev.empty((1 << 16,), "u8"))
            most = max(most, len(driver.memory))
        assert most <= 20

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


# -- captures -------------------------------------------------------------------------------------------------------
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


def test_memory_given_to_a_consumer_in_a_capture_is_the_graphs(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        number = driver.begin_capture(handle)
        with Stream.from_handle(dev, handle):
            kept = lend(dev.empty(SHAPE), handle)
            driver.use(kept[0].base, handle)
            kept.clear()
            dev.bytes_in_use()
        assert driver.end_capture(handle)
        dev.synchronize()
        assert len(driver.memory) == 1
        driver.end_graph(number)
        dev.bytes_in_use()
        dev.synchronize()
        assert not driver.memory

    run(work)


def test_memory_used_on_a_stream_of_ours_that_the_caller_captures_waits_for_the_end_of_that(driver, run):
    def work(dev):
        ours = dev.stream()
        with ours:
            one, other = dev.zeros(SHAPE), dev.zeros(SHAPE)
        dev.fill_zero(other)
        with ours:
            dev.executor().clone(other)
        driver.begin_capture(ours.handle)
        del one, other
        dev.bytes_in_use()
        assert list(driver.capturing) == [ours.handle]
        assert driver.end_capture(ours.handle)
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


@pytest.mark.parametrize("captured", ["reader", "writer"])
def test_memory_of_two_streams_one_of_which_is_captured_is_freed_behind_both(driver, run, captured):
    def work(dev):
        driver.is_slow = True
        writer, reader = dev.stream(), dev.stream()
        with writer:
            tensor = dev.zeros(SHAPE)
        with reader:
            dev.executor().clone(tensor)
        with writer:
            dev.executor().clone(tensor)
        handle = (reader if captured == "reader" else writer).handle
        driver.begin_capture(handle)
        del tensor
        dev.bytes_in_use()
        assert driver.memory, "one of its streams is under capture"
        assert driver.end_capture(handle)
        dev.bytes_in_use()
        dev.bytes_in_use()
        assert not driver.memory

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


@pytest.mark.parametrize("where", ["before it is closed", "after"])
def test_memory_of_a_stream_that_dies_is_freed_behind_it_by_whatever_thread(driver, run, where):
    def work(dev):
        driver.is_slow = True
        stream, retire = dev.stream(), dev.retire
        with stream:
            tensor = dev.zeros(SHAPE)
        current.executors.clear()

        def retire_later(stream):
            with ThreadPoolExecutor(1) as other:  # as the finalizer of the stream runs
                if where == "before it is closed":
                    other.submit(dev.bytes_in_use).result()
                retire(stream)
                other.submit(dev.bytes_in_use).result()

        dev.retire = retire_later
        del tensor
        stream.__del__()
        del dev.retire
        dev.bytes_in_use()
        assert not driver.memory

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


def test_what_a_captured_call_is_first_to_need_is_the_graphs(driver, run):
    class Scaled(Plan):
        __slots__ = ()

        def enqueue(self, arguments):
            addresses.extend([executor.scalar(0.5, F32), executor.zeros(64)])
            for address in addresses:
                driver.step(executor.target.value, address)

    def work(dev):
        nonlocal executor
        handle = driver.begin_theirs()
        number = driver.begin_capture(handle)
        with Stream.from_handle(dev, handle):
            executor = dev.executor()
            executor.enqueue(Scaled(None, capture_safe=True), (), (), ())
        assert driver.end_capture(handle)
        current.executors.pop(executor.stream).close()
        executor = current.executor = None
        for _ in range(2):
            dev.bytes_in_use()
        assert set(addresses) <= set(driver.memory)
        driver.end_graph(number)
        for _ in range(2):
            dev.bytes_in_use()
        assert not driver.memory

    executor, addresses = None, []
    run(work)


def test_two_threads_that_capture_into_one_graph_both_have_their_memory_kept(driver, run, monkeypatch):
    def work(dev):
        handle = driver.begin_theirs()
        number = driver.begin_capture(handle)
        made = callers_graph._Graph

        def slow(graph):
            if not busy:
                busy.append(True)
                dev.graphs.keep(stream, "the other's")
            return made(graph)

        with Stream.from_handle(dev, handle) as stream, monkeypatch.context() as patch:
            busy = []
            patch.setattr(callers_graph, "_Graph", slow)
            dev.graphs.keep(stream, "ours")
        assert sorted(dev.graphs.known[number].kept) == ["ours", "the other's"]
        assert driver.end_capture(handle)

    run(work)


def test_new_weights_in_a_capture_are_kept_for_the_graph(driver, run):
    def work(dev):
        handle, target, source = driver.begin_theirs(), dev.zeros(SHAPE), dev.zeros(SHAPE)
        request = SimpleNamespace(tensors=lambda: [("b", target, False)])
        number = driver.begin_capture(handle)
        with Stream.from_handle(dev, handle):
            refit(dev.executor(), request, {"b": source})
        assert driver.end_capture(handle)
        where = source.ptr
        del source
        dev.synchronize()
        dev.bytes_in_use()
        assert where in driver.memory
        driver.end_graph(number)
        dev.bytes_in_use()
        dev.synchronize()
        assert where not in driver.memory

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


def test_work_from_before_a_capture_on_a_stream_that_went_in_it_is_not_forgotten(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle):
            tensor = dev.zeros(SHAPE)
            driver.begin_capture(handle)  # so that nothing can be recorded behind the zeros as the block ends
        assert driver.end_capture(handle)
        driver.end_theirs(handle)
        del tensor
        dev.bytes_in_use()
        assert len(driver.memory) == 1
        dev.synchronize()
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


@pytest.mark.parametrize("is_used_again", [False, True])
def test_nor_is_it_where_the_handle_means_another_stream_by_then(driver, run, is_used_again):
    def work(dev):
        driver.is_slow = True
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle):
            tensor = dev.zeros(SHAPE)
            driver.begin_capture(handle)
        assert driver.end_capture(handle)
        driver.end_theirs(handle)
        driver.begin_theirs(handle)
        with Stream.from_handle(dev, handle):
            if is_used_again:
                dev.fill_zero(tensor)
            del tensor
            dev.bytes_in_use()
        dev.bytes_in_use()
        assert len(driver.memory) == 1
        dev.synchronize()
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


def test_a_stream_that_is_named_again_once_its_capture_has_ended_sees(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle) as theirs:
            tensor = dev.zeros(SHAPE)
            driver.begin_capture(handle)
        assert theirs.blind
        with theirs:
            assert driver.end_capture(handle)
        assert not theirs.blind
        driver.end_theirs(handle)
        dev.fill_zero(tensor)
        del tensor
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


def test_a_recording_that_is_lost_is_repeated_then_given_up_and_errors_are_raised(driver, run):
    def work(dev):
        executor = dev.executor()
        target, tries = executor.target.value, []

        def lost():
            tries.append(executor.target.value)
            if len(tries) <= losses:
                driver.lose("another library")

        losses = 0
        for losses, is_recorded in ((0, True), (TRIES - 1, True), (TRIES, False)):  # noqa: B007  # `lost` reads it
            tries.clear()
            assert (executor.capture(lost) is not None) == is_recorded
            assert executor.target.value == target not in tries
        with pytest.raises(ZeroDivisionError):
            executor.capture(lambda: 1 // 0)
        assert executor.target.value == target
        assert not driver.capturing
        assert executor.capture(lambda: None) is not None
        driver.lost.clear()

    run(work)


def test_a_wait_for_the_device_and_a_recording_never_meet(run):
    def work(dev):
        stop = threading.Event()

        def record():
            dev.activate()
            for _ in range(150):
                assert dev.executor().capture(lambda: None) is not None

        def wait():
            dev.activate()
            while not stop.is_set():
                dev.synchronize()

        with ThreadPoolExecutor(5) as pool:
            waiting = pool.submit(wait)
            recording = [pool.submit(record) for _ in range(4)]
            try:
                for one in recording:
                    one.result()
            finally:
                stop.set()
            waiting.result()

    run(work)


def test_who_waits_for_the_device_waits_for_a_recording_to_end(run):
    def work(dev):
        started, ended = threading.Event(), threading.Event()

        def enqueue():
            started.set()
            while not dev.recordings._losing and not ended.is_set():
                time.sleep(0)  # until the other thread is there

        def wait():
            dev.activate()
            started.wait()
            try:
                dev.synchronize()
            finally:
                ended.set()

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            assert dev.executor().capture(enqueue) is not None
            waiting.result()

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


def test_two_recordings_that_run_out_of_memory_do_not_wait_for_each_other():
    recordings, both, over = Recordings(), threading.Barrier(2), []

    def record():
        with recordings.one():
            both.wait(PATIENCE)
            with recordings.none():
                over.append(threading.get_ident())

    threads = [threading.Thread(target=record, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(over) == 2
    with recordings.none():
        assert not recordings._recording


def test_recordings_may_be_made_inside_of_one_another_and_wait_for_no_wait_of_their_own_thread():
    recordings = Recordings()
    with recordings.one(), recordings.none(), recordings.one():
        pass
    with recordings.none(), recordings.none():
        pass
    with pytest.raises(ZeroDivisionError), recordings.one():
        _ = 1 // 0
    with recordings.none():
        pass


class Interrupt:
    """Ctrl-C at line event number `at` of recordings.py, but for those at which the interpreter takes no signal."""

    def __init__(self, at):
        self.at, self.count, self.last, self.came = at, 0, 0, False

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != recordings_module.__file__:
            return None
        line, name = frame.f_lineno, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        is_exit = name.startswith("with ") and line < self.last
        if event == "line" and not is_exit and name != "try:" and ".pop(" not in name:
            self.count += 1
            if self.count == self.at:
                self.came = True
                raise KeyboardInterrupt
        self.last = line if event == "line" else self.last
        return self


@pytest.mark.parametrize("kind", ["one", "none"])
def test_an_interrupt_at_every_line_of_a_recording_lets_others_record_and_wait(kind):
    for at in itertools.count(1):
        recordings, interrupt, before, over = Recordings(), Interrupt(at), sys.gettrace(), []
        sys.settrace(interrupt)
        with suppress(KeyboardInterrupt), getattr(recordings, kind)():
            pass
        sys.settrace(before)

        def use(recordings=recordings, over=over):
            with recordings.none():
                over.append(0)
            with recordings.one():
                over.append(1)

        thread = threading.Thread(target=use, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert over == [0, 1]
        if not interrupt.came:
            break
    assert at > 5


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


# -- in any order -----------------------------------------------------------------------------------------------------
class Walk:
    """Acts at random of a program that shares memory, streams and captures with other libraries."""

    def __init__(self, driver, dev, seed):
        self.driver, self.dev, self.random = driver, dev, random.Random(seed)
        self.theirs, self.gone, self.entered = [], [], []
        self.tensors, self.lent, self.graphs = [], [], []
        self.captured = None
        self.acts = []

    def act(self):
        self.acts.append(self.random.choice([name for name in dir(self) if name.startswith("do_")]))
        getattr(self, self.acts[-1])()

    def a_tensor(self):
        return self.random.choice(self.tensors) if self.tensors else None

    def may_refuse(self):
        return self.captured is not None or bool(self.dev.externals.blind())

    def is_captured(self):
        return bool(self.entered) and self.captured is not None and self.entered[-1][0] == self.captured[0]

    def do_begin_stream(self):
        handle = self.gone.pop() if self.gone and self.random.random() < 0.7 else None
        self.theirs.append(self.driver.begin_theirs(handle))

    def do_end_stream(self):
        free = [h for h in self.theirs if h not in [e[0] for e in self.entered] and not self._in_capture(h)]
        if free:
            handle = self.random.choice(free)
            self.theirs.remove(handle)
            self.gone.append(handle)
            self.driver.end_theirs(handle)

    def _in_capture(self, handle):
        return handle in self.driver.capturing

    def do_enter(self):
        if self.theirs and len(self.entered) < 3:
            handle = self.random.choice([*self.theirs, 0, 2])
            stream = Stream.from_handle(self.dev, handle)
            stream.__enter__()
            self.entered.append((handle, stream))

    def do_enter_ours(self):
        if len(self.entered) < 3:
            stream = self.dev.stream()
            stream.__enter__()
            self.entered.append((-1, stream))

    def do_leave(self):
        if self.entered:
            self.entered.pop()[1].__exit__()

    def do_make(self):
        if len(self.tensors) < 12:
            self.tensors.append(self.dev.zeros(SHAPE))

    def do_write(self):
        tensor = self.a_tensor()
        if tensor is not None:
            try:
                self.dev.fill_zero(tensor)
            except BadRequest:
                assert self.may_refuse()

    def do_read(self):
        tensor = self.a_tensor()
        if tensor is not None and not self.is_captured():
            try:
                self.tensors.append(self.dev.executor().clone(tensor))
            except BadRequest:
                assert self.may_refuse()

    def do_drop(self):
        if self.tensors:
            self.tensors.pop(self.random.randrange(len(self.tensors)))

    def do_lend(self):
        tensor = self.a_tensor()
        if tensor is not None and self.theirs:
            handle = self.random.choice(self.theirs)
            try:
                self.lent.append((lend(tensor, handle), handle, self.driver.streams[handle]))
            except BadRequest:
                assert self.may_refuse()

    def do_show(self):
        tensor = self.a_tensor()
        if tensor is not None:
            try:
                dlpack.cuda_array_interface(tensor)
            except BadRequest:
                assert self.may_refuse()

    def do_use(self):
        alive = [
            one
            for one in self.lent
            if self.driver.streams.get(one[1]) == one[2] and one[1] not in self.driver.capturing
        ]
        if alive:
            kept, handle, _ = self.random.choice(alive)
            self.driver.use(kept[0].base, handle)

    def do_give_back(self):
        if self.lent:
            self.lent.pop(self.random.randrange(len(self.lent)))

    def do_borrow(self):
        if not self.is_captured() and len(self.tensors) < 12:
            self.tensors.append(borrow(self.dev, object()))

    def do_look(self):
        self.dev.bytes_in_use()

    def do_wait(self):
        if self.captured is None:
            self.dev.synchronize()

    def do_capture(self):
        if self.theirs and self.captured is None:
            handle = self.random.choice(self.theirs)
            self.captured = handle, self.driver.begin_capture(handle, self.random.choice([0, 2]))

    def do_end_capture(self):
        if self.captured is not None:
            handle, number = self.captured
            self.captured = None
            assert self.driver.end_capture(handle), self.driver.lost
            self.graphs.append(number)

    def do_end_graph(self):
        if self.graphs:
            self.driver.end_graph(self.graphs.pop())

    def finish(self):
        while self.entered:
            self.do_leave()
        self.do_end_capture()
        while self.graphs:
            self.do_end_graph()
        self.tensors.clear()
        self.lent.clear()
        current.executors.clear()
        gc.collect()
        for _ in range(3):
            self.dev.bytes_in_use()
            self.dev.synchronize()


@pytest.mark.parametrize("block", range(4))
def test_a_program_in_any_order(driver, run, block):
    for seed in range(block * 12, block * 12 + 12):
        driver.is_slow = bool(seed % 2)

        def work(dev, seed=seed):
            walk = Walk(driver, dev, seed)
            for _ in range(120):
                walk.act()
                assert (driver.touched, driver.early, driver.lost) == ([], [], []), seed
            walk.finish()
            with relaxed():
                dev.releases.collect()
            assert not driver.memory, seed

        run(work)
