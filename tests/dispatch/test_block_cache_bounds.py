"""How much memory is kept to be handed out again: its bounds, and what makes room for what."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dispatch.device.block_cache import LARGEST, MAX_BLOCKS, MAX_BYTES, MAX_LISTS
from dispatch.keys import F32, U8

spec = importlib.util.spec_from_file_location("kept_blocks", Path(__file__).with_name("kept_blocks.py"))
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)
SHAPE, UNIT, kept, room = blocks.SHAPE, blocks.UNIT, blocks.kept, blocks.room


def test_ever_different_sizes_do_not_add_up(driver, run):
    def work(dev):
        most = lists = 0
        for number in range(10_000):
            dev.executor().empty((number + 1,), (1,), F32)
            if number % 97 == 0:
                most = max(most, kept(dev)[1])
                lists = max(lists, len(dev.blocks._lists))
                assert room(dev) <= MAX_BYTES
        assert lists <= MAX_LISTS
        assert len(dev.executor().stream.free_lists) <= MAX_LISTS
        assert len(driver.memory) <= MAX_LISTS + 2
        assert most <= MAX_LISTS * 40_960
        assert len(dev.output_layouts) <= 4096

    run(work)


def test_large_sizes_are_bounded_in_bytes(driver, run):
    def work(dev):
        for number in range(100):
            dev.empty(LARGEST - number * UNIT, U8)
            assert kept(dev)[1] <= room(dev) <= MAX_BYTES
        assert driver.reuses == 0
        dev.empty(LARGEST + 1, U8)
        dev.empty(LARGEST + 1, U8)
        assert driver.reuses == 0
        dev.trim()
        many = [dev.empty(LARGEST, U8) for _ in range(12)]
        many.clear()
        assert kept(dev) == (MAX_BYTES // LARGEST, MAX_BYTES)
        many = [dev.empty(1, U8) for _ in range(3 * MAX_BLOCKS)]
        many.clear()
        assert kept(dev)[1] <= MAX_BYTES
        dev.trim()
        many = [dev.empty(1, U8) for _ in range(3 * MAX_BLOCKS)]
        many.clear()
        assert kept(dev) == (MAX_BLOCKS, MAX_BLOCKS * UNIT)

    run(work)


def test_the_bounds_are_of_all_streams_together(run):
    def work(dev):
        streams = [dev.stream() for _ in range(12)]
        for each in streams:
            with each:
                dev.empty(LARGEST, U8)
        assert kept(dev) == (8, MAX_BYTES)
        assert [bool(each.free_lists) for each in streams] == [False] * 4 + [True] * 8

    run(work)


def test_what_is_asked_for_again_and_again_stays_while_other_sizes_come_and_go(driver, run):
    def work(dev):
        dev.empty(1, U8)
        for number in range(5 * MAX_LISTS):
            reuses = driver.reuses
            dev.empty(1, U8)
            assert driver.reuses == reuses + 1
            dev.empty(1000 + UNIT * number, U8)

    run(work)


def test_what_nobody_asks_for_any_more_makes_room(driver, run):
    def work(dev):
        many = [dev.empty(1 << 20, U8) for _ in range(64)]
        many.clear()
        assert kept(dev)[1] == MAX_BYTES
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
        assert kept(dev)[1] <= MAX_BYTES

    run(work)


def test_a_count_that_an_exception_has_left_wrong_is_put_right(driver, run):
    def work(dev):
        dev.blocks._kept = 10 * MAX_BYTES
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
