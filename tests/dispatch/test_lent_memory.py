"""Memory that was lent or shown to another library is held until what that does with it is done."""

from __future__ import annotations

import gc
import importlib.util
import threading
from pathlib import Path

import pytest

from dispatch.device import dlpack
from dispatch.device.cuda import CudaDevice
from dispatch.device.stream import Stream
from dispatch.supervise.process.chunks import file_chunk
from dispatch.supervise.process.shared_device import SharedCuda

spec = importlib.util.spec_from_file_location("lent_and_borrowed", Path(__file__).with_name("lent_and_borrowed.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
SHAPE, lend = memory.SHAPE, memory.lend


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
        taken = dlpack.Imported(tensor.__dlpack__(stream=-1, max_version=(1, 1)))
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
        self._init_memory()

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
