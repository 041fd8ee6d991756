"""Memory that is handed out again without a call of the driver: in order, and to one storage at a time.

The stand-in for the driver sees each storage that is made and dies; it notes memory that is handed out or freed while
a storage has it, or before what was enqueued with it is behind the stream that it is handed out for.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter
from pathlib import Path

import pytest

from dispatch.device.dlpack import _lend, cuda_array_interface
from dispatch.device.stream import Stream, current
from dispatch.errors import DeviceFault, OutOfMemory
from dispatch.keys import F32, U8

spec = importlib.util.spec_from_file_location("kept_blocks", Path(__file__).with_name("kept_blocks.py"))
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)
SHAPE, UNIT, taken, kept, made_again = blocks.SHAPE, blocks.UNIT, blocks.taken, blocks.kept, blocks.made_again


# -- what is handed out again ------------------------------------------------------------------------------------------
def test_a_repeated_allocation_makes_no_call_of_the_driver(driver, run):
    def work(dev):
        empty, size = dev.executor().empty, (SHAPE, (8, 1), F32)
        x = empty(*size)
        x = empty(*size)  # while the first is there, as in `x = op(x)`
        calls = Counter(driver.calls)
        for _ in range(100):
            x = empty(*size)  # noqa: F841
        assert driver.calls == calls
        assert driver.reuses == 100
        assert len(driver.memory) == 2

    run(work)


def test_as_many_blocks_are_kept_as_were_in_use_at_once(driver, run):
    def work(dev):
        for _ in range(3):
            several = [dev.empty(SHAPE) for _ in range(20)]
            assert len({each.ptr for each in several}) == 20
            several.clear()
        assert driver.reuses == 40
        assert kept(dev) == (20, 20 * UNIT)

    run(work)


@pytest.mark.parametrize(("first", "then", "is_reused"), [(100, 512, True), (0, 0, True), (512, 513, False)])
def test_blocks_are_of_whole_units(driver, run, first, then, is_reused):
    def work(dev):
        base = dev.empty(first, U8).ptr
        tensor = dev.empty(then, U8)
        assert (tensor.ptr == base) == is_reused
        assert (tensor.nbytes, tensor.storage.nbytes) == (then, then)
        assert driver.memory[tensor.ptr][1] >= then

    run(work)


def test_memory_of_one_stream_is_not_handed_out_on_another(driver, run):
    def work(dev):
        driver.is_slow = True
        one, other = dev.stream(), dev.stream()
        first = made_again(dev, one)
        assert made_again(dev, other) != first
        assert made_again(dev, one) == first

    run(work)


def test_memory_that_several_streams_have_used_is_kept_only_where_one_is_behind_them_all(driver, run):
    def work(dev):
        driver.is_slow = True
        home, other = dev.executor().stream, dev.stream()
        base = made_again(dev)
        tensor = dev.zeros(SHAPE)
        assert tensor.ptr == base
        with other:
            dev.executor().clone(tensor)
        del tensor
        assert base not in home.free_lists[1].bases, "the other has read it since"
        tensor = dev.zeros(SHAPE)
        with other:
            dev.fill_zero(tensor)
        base = tensor.ptr
        del tensor
        assert base not in home.free_lists[1].bases, "the other wrote it last"
        tensor = dev.zeros(SHAPE)
        with other:
            dev.executor().clone(tensor)
            dev.fill_zero(tensor)
        dev.fill_zero(tensor)  # behind all of that
        base = tensor.ptr
        del tensor
        assert made_again(dev) == base

    run(work)


@pytest.mark.parametrize("how", ["lent", "shown"])
def test_memory_that_others_have_seen_is_not_kept(driver, run, how):
    def work(dev):
        tensor, theirs = dev.zeros(SHAPE), driver.begin_theirs()
        if how == "lent":
            _lend(tensor, theirs)
        else:
            cuda_array_interface(tensor)
        driver.use(tensor.ptr, theirs)
        base = tensor.ptr
        del tensor
        assert kept(dev)[0] == 0
        assert made_again(dev) != base
        with Stream.from_handle(dev, theirs):
            pass

    run(work)


def test_nothing_is_kept_on_a_stream_of_others(driver, run):
    def work(dev):
        with Stream.from_handle(dev, driver.begin_theirs()) as theirs:
            for _ in range(3):
                dev.zeros(SHAPE)
            assert not theirs.free_lists
        assert (driver.reuses, kept(dev)) == (0, (0, 0))

    run(work)


def test_a_stream_that_others_know_hands_out_nothing_again(driver, run):
    def work(dev):
        home = dev.stream()
        tensor, base = None, made_again(dev, home)
        with home:
            tensor = dev.zeros((100, 100))
        number = driver.begin_capture(home.handle)
        assert (kept(dev), home.free_lists) == ((0, 0), {})
        with home:
            made = dev.zeros(SHAPE)
            assert made.ptr != base
            dev.bytes_in_use()
            assert base in driver.memory, "its stream is under capture"
        del tensor
        assert driver.end_capture(home.handle)
        assert made_again(dev, home) != base
        assert kept(dev) == (0, 0)
        dev.bytes_in_use()
        assert list(driver.memory) == [made.ptr]
        del made
        driver.end_graph(number)

    run(work)


@pytest.mark.parametrize("how", ["close", "drop", "cycle"])
def test_a_stream_that_goes_gives_its_blocks_back_behind_its_work(driver, run, how):
    def work(dev):
        dev.executor()
        driver.is_slow = True
        home = dev.stream()
        base = made_again(dev, home)
        assert base in driver.memory
        if how == "close":
            home.close()
            assert home.free_lists == {}
        else:
            current.executors.pop(home)
            ring = [home] if how == "cycle" else []
            ring.append(ring)
            del home, ring
            gc.collect()
        assert kept(dev) == (0, 0)
        dev.bytes_in_use()
        dev.bytes_in_use()
        assert not driver.memory

    run(work)


def test_what_dies_after_its_stream_was_closed_is_freed(run):
    def work(dev):
        home = dev.stream()
        with home:
            tensor = dev.zeros(SHAPE)
        home.close()
        del tensor
        assert kept(dev) == (0, 0)
        assert dev.bytes_in_use() == 0

    run(work)


# -- the end of a device -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["fault", "fork", "close"])
def test_a_device_that_is_lost_hands_out_nothing_again(driver, run, how):
    def work(dev):
        executor, other = dev.executor(), dev.zeros((9, 9))
        made_again(dev)
        if how == "fault":
            with pytest.raises(DeviceFault):
                dev.fail(700, "cuCtxSynchronize")
        elif how == "fork":
            dev.after_fork()
        else:
            dev.close()
        reuses = driver.reuses
        del other
        assert kept(dev) == (0, 0)
        if how != "close":
            executor.empty(SHAPE, (8, 1), F32)
            executor.empty(SHAPE, (8, 1), F32)
        assert (driver.reuses, kept(dev)) == (reuses, (0, 0))
        if how != "close":
            dev.fault = None  # so that the stand-in's streams are destroyed

    run(work)


def test_a_forked_child_has_none_of_its_parents_blocks(run):
    def work(dev):
        made_again(dev)
        child = os.fork()
        if not child:
            os._exit(0 if kept(dev) == (0, 0) and not dev.blocks._changing.locked() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert kept(dev) == (1, UNIT)

    run(work)


# -- what is counted, and what runs out --------------------------------------------------------------------------------
def test_bytes_in_use_are_those_of_tensors(run):
    def work(dev):
        base = dev.bytes_in_use()
        held = [dev.empty(size, U8) for size in (1, 512, 513, 5000)]
        for _ in range(3):
            dev.empty(10_000, U8)
            dev.empty(1, U8)
        assert kept(dev)[0] == 2
        assert dev.bytes_in_use() - base == UNIT * (1 + 1 + 2 + 10)
        held.clear()
        assert dev.bytes_in_use() == base

    run(work)


def test_trim_gives_all_of_it_back(driver, run):
    def work(dev):
        for size in (100, 1000, 10_000):
            dev.empty(size, U8)
        dev.trim()
        assert not driver.memory

    run(work)


@pytest.mark.parametrize("is_captured", [False, True])
def test_memory_that_runs_out_is_looked_for_among_the_blocks_first(driver, run, is_captured):
    def work(dev):
        sizes = [UNIT * n for n in range(1, 50)]
        for size in sizes:
            dev.empty(size, U8)
        driver.room = taken(driver)
        if is_captured:  # by this thread, who must not wait for the device then
            handle = driver.begin_theirs()
            theirs = Stream.from_handle(dev, handle)
            driver.begin_capture(handle)
            with theirs:
                assert dev.empty(sum(sizes), U8).nbytes == sum(sizes)
            assert driver.end_capture(handle)
        else:
            waits = driver.calls["cuCtxRecordEvent"]
            assert dev.empty(sum(sizes), U8).nbytes == sum(sizes)
            assert driver.calls["cuCtxRecordEvent"] == waits, "nothing was waited for"
        with pytest.raises(OutOfMemory):
            dev.empty(sum(sizes) + 1, U8)

    run(work)
