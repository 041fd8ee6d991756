"""A program that shares memory, streams and captures with other libraries, in any order."""

from __future__ import annotations

import gc
import importlib.util
import random
from pathlib import Path

import pytest

from dispatch.device import dlpack
from dispatch.device.stream import Stream, current, relaxed
from dispatch.errors import BadRequest

spec = importlib.util.spec_from_file_location("lent_and_borrowed", Path(__file__).with_name("lent_and_borrowed.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
SHAPE, lend, borrow = memory.SHAPE, memory.lend, memory.borrow


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
        return self.captured is not None or bool(self.dev.externals.unmarked())

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
