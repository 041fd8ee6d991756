"""Memory that is handed out again, in programs of any order and among threads that share a stream."""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
import threading
from pathlib import Path

import pytest

from dispatch.device import block_cache
from dispatch.device.dlpack import _lend
from dispatch.device.stream import current
from dispatch.keys import U8

spec = importlib.util.spec_from_file_location("kept_blocks", Path(__file__).with_name("kept_blocks.py"))
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)
SHAPE, UNIT, taken, kept = blocks.SHAPE, blocks.UNIT, blocks.taken, blocks.kept


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
    monkeypatch.setattr(block_cache, "MAX_BYTES", 1 << 14)
    monkeypatch.setattr(block_cache, "MAX_LISTS", 5)
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
