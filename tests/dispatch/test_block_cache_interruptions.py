"""Memory that is handed out again, with finalizers, signal handlers and other threads between any two steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from dispatch.device import block_cache, cuda, storage, stream
from dispatch.device.stream import current
from dispatch.keys import F32, U8

spec = importlib.util.spec_from_file_location("kept_blocks", Path(__file__).with_name("kept_blocks.py"))
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)
SHAPE, UNIT = blocks.SHAPE, blocks.UNIT

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
    monkeypatch.setattr(block_cache, "MAX_LISTS", 3)

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
