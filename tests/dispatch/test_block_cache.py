"""Memory that is handed out again without a call of the driver: in order, to one storage at a time, and bounded.

The stand-in for the driver sees each storage that is made and dies; it notes memory that is handed out or freed while
a storage has it, or before what was enqueued with it is behind the stream that it is handed out for.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
from collections import Counter

import pytest

from dispatch.device import block_cache, cuda, storage, stream
from dispatch.device.block_cache import LARGEST, MOST_BLOCKS, MOST_BYTES, MOST_LISTS
from dispatch.device.dlpack import _lend, cuda_array_interface
from dispatch.device.stream import Stream, current
from dispatch.errors import DeviceFault, OutOfMemory
from dispatch.keys import F32, U8

SHAPE = (4, 8)
UNIT = 512


def taken(driver):
    """The bytes that the driver has given out."""
    return sum(-(-size // UNIT) * UNIT for _, size, _ in driver.memory.values())


def kept(dev):
    """The blocks that are kept, and their bytes."""
    lists = list(dev.blocks._lists)
    return sum(len(each.bases) for each in lists), sum(len(each.bases) * each.nbytes for each in lists)


def room(dev):
    """The bytes that lists may keep."""
    return sum(each.capacity * each.nbytes for each in dev.blocks._lists if each.is_open)


def made_again(dev, where=None, shape=SHAPE):
    """The address of memory that is allocated on a stream, used there and let go of."""
    with where or dev.executor().stream:
        return dev.zeros(shape).ptr


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


# -- bounds ------------------------------------------------------------------------------------------------------------
def test_ever_different_sizes_do_not_add_up(driver, run):
    def work(dev):
        most = lists = 0
        for number in range(10_000):
            dev.executor().empty((number + 1,), (1,), F32)
            if number % 97 == 0:
                most = max(most, kept(dev)[1])
                lists = max(lists, len(dev.blocks._lists))
                assert room(dev) <= MOST_BYTES
        assert lists <= MOST_LISTS
        assert len(dev.executor().stream.free_lists) <= MOST_LISTS
        assert len(driver.memory) <= MOST_LISTS + 2
        assert most <= MOST_LISTS * 40_960
        assert len(dev.made) <= 4096

    run(work)


def test_large_sizes_are_bounded_in_bytes(driver, run):
    def work(dev):
        for number in range(100):
            dev.empty(LARGEST - number * UNIT, U8)
            assert kept(dev)[1] <= room(dev) <= MOST_BYTES
        assert driver.reuses == 0
        dev.empty(LARGEST + 1, U8)
        dev.empty(LARGEST + 1, U8)
        assert driver.reuses == 0
        dev.trim()
        many = [dev.empty(LARGEST, U8) for _ in range(12)]
        many.clear()
        assert kept(dev) == (MOST_BYTES // LARGEST, MOST_BYTES)
        many = [dev.empty(1, U8) for _ in range(3 * MOST_BLOCKS)]
        many.clear()
        assert kept(dev)[1] <= MOST_BYTES
        dev.trim()
        many = [dev.empty(1, U8) for _ in range(3 * MOST_BLOCKS)]
        many.clear()
        assert kept(dev) == (MOST_BLOCKS, MOST_BLOCKS * UNIT)

    run(work)


def test_the_bounds_are_of_all_streams_together(run):
    def work(dev):
        streams = [dev.stream() for _ in range(12)]
        for each in streams:
            with each:
                dev.empty(LARGEST, U8)
        assert kept(dev) == (8, MOST_BYTES)
        assert [bool(each.free_lists) for each in streams] == [False] * 4 + [True] * 8

    run(work)


def test_what_is_asked_for_again_and_again_stays_while_other_sizes_come_and_go(driver, run):
    def work(dev):
        dev.empty(1, U8)
        for number in range(5 * MOST_LISTS):
            reuses = driver.reuses
            dev.empty(1, U8)
            assert driver.reuses == reuses + 1
            dev.empty(1000 + UNIT * number, U8)

    run(work)


def test_what_nobody_asks_for_any_more_makes_room(driver, run):
    def work(dev):
        many = [dev.empty(1 << 20, U8) for _ in range(64)]
        many.clear()
        assert kept(dev)[1] == MOST_BYTES
        dev.empty(1 << 19, U8)
        assert kept(dev)[1] == 1 << 19
        dev.empty(1 << 19, U8)
        assert driver.reuses == 1

    run(work)


def test_lists_that_grew_for_what_never_came_back_do_not_keep_others_out(driver, run):
    def work(dev):
        held = [dev.empty(1 << 20, U8) for _ in range(200)]  # as weights are
        for _ in range(20):
            dev.empty(1 << 21, U8)
        assert driver.reuses >= 18
        held.clear()
        assert kept(dev)[1] <= MOST_BYTES

    run(work)


def test_a_count_that_an_exception_has_left_wrong_is_put_right(driver, run):
    def work(dev):
        dev.blocks._kept = 10 * MOST_BYTES
        for _ in range(3):
            dev.empty(1, U8)
        assert driver.reuses == 1

    run(work)


def test_what_lists_may_keep_grows_anew_once_they_were_emptied(run):
    def work(dev):
        for _ in range(10):
            dev.empty(SHAPE)
            dev.bytes_in_use()
        assert room(dev) <= 2 * UNIT

    run(work)


def test_what_waits_elsewhere_is_looked_at_though_nothing_is_allocated(driver, run):
    def work(dev):
        dev.empty(SHAPE)
        other = dev.stream()
        tensor = dev.zeros((90, 9))
        with other:
            dev.executor().clone(tensor)
        base = tensor.ptr
        del tensor
        reuses = driver.reuses
        dev.empty(SHAPE)
        assert driver.reuses == reuses + 1
        assert base not in driver.memory

    run(work)


# -- in between any two steps ------------------------------------------------------------------------------------------
FILES = {module.__file__ for module in (block_cache, cuda, storage, stream)}


class Interruption:
    """Acts before one opcode in the modules under test, as a finalizer, a signal handler or another thread may."""

    def __init__(self, at, act):
        self.at, self.act, self.count = at, act, 0

    def trace(self, frame, event, _):
        if frame.f_code.co_filename not in FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                self.act()
        return self.trace


def in_between(scene):
    """Run a scene as often as it has opcodes, with an act before each; `scene()` makes what is run, and the act."""
    at = 1
    while True:
        step, act, check = scene()
        interruption = Interruption(at, act)
        sys.settrace(interruption.trace)
        try:
            step()
        finally:
            sys.settrace(None)
        check()
        if interruption.count < at:
            return at
        at += 1


def make_and_drop(dev, _):
    first = dev.zeros(SHAPE)
    second = dev.zeros(SHAPE)
    assert first.ptr != second.ptr


def make_several(dev, _):
    held = [dev.zeros(SHAPE) for _ in range(3)]
    assert len({each.ptr for each in held}) == 3


def make_others(dev, _):
    for size in range(3, 9):
        dev.empty(size * UNIT, U8)


def drop_another(dev, _):
    other = dev.stream()
    with other:
        make_and_drop(dev, other)
    other.close()


MAKING = {
    "make and drop": make_and_drop,
    "make several": make_several,
    "make others": make_others,
    "count": lambda dev, _: dev.bytes_in_use(),
    "show": lambda _, home: home.handle,
    "close another": drop_another,
    "lose": lambda dev, _: dev.blocks.lose(),
}
DROPPING = {**MAKING, "close": lambda _, home: home.close()}


def look(driver, dev, home, *, is_lost):
    """Nothing is wrong, and nothing is left once the stream is closed."""
    assert (driver.touched, driver.early) == ([], [])
    if home.external or home.closed:
        assert not home.free_lists
    home.close()
    current.executors.pop(home, None)
    assert all(each.is_open or not each.bases for each in dev.blocks._lists)
    count = dev.bytes_in_use()
    if is_lost:
        driver.memory.clear()  # it would go with the context
    else:
        assert count == 0
        assert not driver.memory
    dev.blocks._is_lost = False


def acting(act, dev, home):
    def interrupt():
        with home:
            act(dev, home)

    return interrupt


@pytest.mark.parametrize("act", MAKING)
@pytest.mark.parametrize("is_known", [False, True])
def test_whatever_comes_in_between_two_steps_as_memory_is_made(driver, run, monkeypatch, act, is_known):
    monkeypatch.setattr(block_cache, "MOST_LISTS", 3)

    def work(dev):
        driver.is_slow = True
        dev.executor()

        def scene():
            home = dev.stream()
            executor = dev.executor(home)
            if is_known:
                with home:
                    make_and_drop(dev, home)

            def step():
                first = executor.empty(SHAPE, (8, 1), F32)
                second = executor.empty(SHAPE, (8, 1), F32)
                driver.step(executor.target.value, first.ptr)
                assert first.ptr != second.ptr
                del first
                third = executor.empty(SHAPE, (8, 1), F32)
                assert third.ptr != second.ptr

            return step, acting(MAKING[act], dev, home), lambda: look(driver, dev, home, is_lost=act == "lose")

        assert in_between(scene) > 100

    run(work)


@pytest.mark.parametrize("act", DROPPING)
def test_whatever_comes_in_between_two_steps_as_memory_dies(driver, run, act):
    def work(dev):
        driver.is_slow = True
        dev.executor()

        def scene():
            home = dev.stream()
            with home:
                tensors = [dev.zeros(SHAPE) for _ in range(3)]
                tensors.pop()
                interrupt = acting(DROPPING[act], dev, home)
            return tensors.clear, interrupt, lambda: look(driver, dev, home, is_lost=act == "lose")

        assert in_between(scene) > 50

    run(work)


@pytest.mark.parametrize("how", ["close", "show", "drop"])
def test_memory_that_is_made_and_dies_as_its_stream_goes(driver, run, how):
    def work(dev):
        driver.is_slow = True
        dev.executor()

        def scene():
            home, other = dev.stream(), dev.stream()
            with home:
                tensors = [dev.zeros(SHAPE) for _ in range(3)]
                tensors.pop()
            box = [home]

            def step():
                going = box.pop()
                if how == "close":
                    going.close()
                elif how == "show":
                    assert going.handle
                else:
                    current.executors.pop(going, None)
                    del going
                    tensors.clear()

            def interrupt():
                if how != "drop":
                    tensors.clear()
                with other:
                    make_and_drop(dev, other)
                dev.bytes_in_use()

            def check():
                tensors.clear()
                look(driver, dev, other, is_lost=False)

            return step, interrupt, check

        assert in_between(scene) > 10

    run(work)


def test_threads_that_share_a_stream_never_have_the_same_memory(driver, run):
    def work(dev):
        home, wrong = dev.stream(), []
        owners = {}

        def use(number):
            dev.activate()
            try:
                with home:
                    mine = []
                    for turn in range(300):
                        tensor = dev.empty(SHAPE)
                        if owners.setdefault(tensor.ptr, number) != number:
                            wrong.append(tensor.ptr)
                        mine.append(tensor)
                        if turn % 3:
                            gone = mine.pop(0)
                            del owners[gone.ptr]
                            del gone
                        if turn % 50 == 0:
                            dev.bytes_in_use()
                    for each in mine:
                        del owners[each.ptr]
                    mine.clear()
                    del tensor
            except Exception as error:  # noqa: BLE001  # told below
                wrong.append(error)

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()
        finally:
            sys.setswitchinterval(before)
        assert not wrong
        assert driver.reuses > 100
        for _ in range(2):
            dev.bytes_in_use()
        assert not driver.memory

    run(work)


# -- in any order ------------------------------------------------------------------------------------------------------
class Walk:
    """Acts at random of a program with several streams, some of which others capture or that are closed."""

    def __init__(self, driver, dev, seed):
        self.driver, self.dev, self.random = driver, dev, random.Random(seed)
        self.streams, self.tensors = [dev.stream(), dev.stream()], []

    def act(self):
        names = [name for name in dir(self) if name.startswith("do_")]
        getattr(self, self.random.choice([*names, *["do_make", "do_drop"] * 4]))()

    def a_stream(self):
        return self.random.choice(self.streams)

    def do_make(self):
        if len(self.tensors) < 30:
            with self.a_stream():
                self.tensors.append(self.dev.zeros(self.random.choice([SHAPE, (30, 40), (100, 9)])))

    def do_write(self):
        if self.tensors:
            with self.a_stream():
                self.dev.fill_zero(self.random.choice(self.tensors))

    def do_read(self):
        if self.tensors:
            with self.a_stream():
                self.tensors.append(self.dev.executor().clone(self.random.choice(self.tensors)))

    def do_drop(self):
        for _ in range(self.random.choice([1, 1, 5])):
            if self.tensors:
                self.tensors.pop(self.random.randrange(len(self.tensors)))

    def do_lend(self):
        if self.tensors:
            _lend(self.random.choice(self.tensors), self.driver.begin_theirs())

    def do_open_stream(self):
        if len(self.streams) < 5:
            self.streams.append(self.dev.stream())

    def do_end_stream(self):
        if len(self.streams) > 1:
            ended = self.a_stream()
            self.streams.remove(ended)
            if self.random.random() < 0.5:
                ended.close()
            else:
                current.executors.pop(ended, None)

    def do_capture(self):
        """Another library captures a stream of ours, where nothing is handed out again from then on."""
        captured = self.a_stream()
        number = self.driver.begin_capture(captured.handle)
        reuses = self.driver.reuses
        with captured:
            made = [self.dev.zeros(SHAPE) for _ in range(2)]
            made.clear()
            made = [self.dev.zeros(SHAPE)]
        assert self.driver.reuses == reuses
        assert not captured.free_lists
        self.do_drop()
        for other in self.streams:
            if other is not captured:
                with other:
                    self.dev.zeros(SHAPE)
                    self.dev.zeros(SHAPE)
        assert self.driver.end_capture(captured.handle), self.driver.lost
        made.clear()
        self.driver.end_graph(number)

    def do_count(self):
        count = self.dev.bytes_in_use()
        assert count == taken(self.driver)
        assert kept(self.dev) == (0, 0)

    def do_trim(self):
        self.dev.trim()
        assert taken(self.driver) == sum(-(-each.nbytes // UNIT) * UNIT for each in self.tensors)

    def do_run_out(self):
        self.dev.bytes_in_use()
        wanted = 1 << 16
        self.driver.room = taken(self.driver) + wanted
        for _ in range(3):
            with self.a_stream():
                for size in (wanted // 4, wanted // 2, wanted):
                    self.dev.empty(size, U8)
        self.driver.room = 1 << 40

    def finish(self):
        self.tensors.clear()
        self.streams.clear()
        current.executors.clear()
        gc.collect()
        for _ in range(3):
            self.dev.bytes_in_use()
            self.dev.synchronize()
        self.dev.bytes_in_use()


@pytest.mark.parametrize("block", range(4))
def test_a_program_in_any_order(driver, run, monkeypatch, block):
    monkeypatch.setattr(block_cache, "MOST_BYTES", 1 << 14)
    monkeypatch.setattr(block_cache, "MOST_LISTS", 5)
    reuses = []
    for seed in range(block * 12, block * 12 + 12):
        driver.is_slow = bool(seed % 2)

        def work(dev, seed=seed):
            walk = Walk(driver, dev, seed)
            for _ in range(250):
                walk.act()
                assert (driver.touched, driver.early, driver.lost) == ([], [], []), seed
                assert kept(dev)[1] <= 1 << 14
            walk.finish()
            assert not driver.memory, seed
            dev.close()
            reuses.append(driver.reuses)

        run(work)
    assert reuses[-1] > 12 * 5
