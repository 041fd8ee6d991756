"""Memory that is used in a caller's capture: what belongs to the graph, and what is freed behind which work."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from dispatch.bind.refit import refit
from dispatch.core.request import Plan
from dispatch.device import callers_graph
from dispatch.device.stream import Stream, current
from dispatch.keys import F32

spec = importlib.util.spec_from_file_location("lent_and_borrowed", Path(__file__).with_name("lent_and_borrowed.py"))
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
SHAPE, lend = memory.SHAPE, memory.lend


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
