"""What grows with each distinct number or length is bounded, and what is let go of is used by nobody any more."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace

import pytest

from dispatch.core.request import Plan
from dispatch.device.stream import Stream, current
from dispatch.execute import cuda_executor
from dispatch.keys import F32
from dispatch.ops.matmul.cublaslt import CublasLtPlan
from dispatch.ops.rnn import descriptors as rnn

SHAPE = (4, 8)


@pytest.fixture
def driver(stand_in, monkeypatch):
    monkeypatch.setattr(cuda_executor, "MAX_SCALARS", 8)
    monkeypatch.setattr(cuda_executor, "SCALARS_PER_PAGE", 4)
    return stand_in(1)


class Numbers(Plan):
    """Reads its arguments, numbers, in device memory."""

    __slots__ = ("driver", "executor", "read")

    def __init__(self, driver, executor):
        super().__init__(None, capture_safe=False)
        self.driver, self.executor, self.read = driver, executor, {}

    def enqueue(self, arguments):
        self.read = {number: self.executor.scalar(number, F32) for number in arguments}
        for number, address in self.read.items():
            self.driver.step(self.executor.target.value, address)
            assert ctypes.c_float.from_address(address).value == number


def test_numbers_in_device_memory_are_bounded(driver, run):
    def work(dev):
        driver.is_slow = True
        plan = Numbers(driver, dev.executor())
        for number in range(100):
            dev.executor().enqueue(plan, (float(number), number + 0.5), (), ())
            dev.bytes_in_use()
            assert len(driver.memory) <= 6
        dev.executor().enqueue(plan, (99.0,), (), ())
        assert plan.read == {99.0: dev.executor().scalar(99.0, F32)}

    run(work)


def test_a_recorded_call_keeps_the_numbers_that_it_reads(driver, run):
    def work(dev):
        executor = dev.executor()
        plan, other = Numbers(driver, executor), Numbers(driver, executor)
        executor.enqueue(other, (1.0,), (), ())
        replay = executor.record(plan, (1.0, 2.0))
        addresses = plan.read.copy()
        for number in range(100):
            executor.enqueue(other, (float(number),), (), ())
        dev.bytes_in_use()
        assert replay.launch() == 0
        assert {n: ctypes.c_float.from_address(address).value for n, address in addresses.items()} == {1.0: 1, 2.0: 2}
        assert any(base <= addresses[2.0] < base + size for base, (_, size, _) in driver.memory.items())
        del replay
        driver.graphs.clear()  # it is not told when a recording of ours goes
        for number in range(100):
            executor.enqueue(other, (float(number),), (), ())
        dev.bytes_in_use()
        assert len(driver.memory) <= 6

    run(work)


def test_a_captured_call_keeps_the_numbers_that_it_reads_where_the_executor_begins_anew(driver, run):
    def work(dev):
        handle = driver.begin_theirs()
        with Stream.from_handle(dev, handle):
            plan = Numbers(driver, dev.executor())
            plan.capture_safe = True
            dev.executor().enqueue(plan, tuple(map(float, range(9))), (), ())
            number = driver.begin_capture(handle)
            dev.executor().enqueue(plan, (100.0, 101.0), (), ())
            read = set(plan.read.values())
        assert driver.end_capture(handle)
        current.executors.clear()
        plan = None
        gc.collect()
        for _ in range(2):
            dev.bytes_in_use()
        pages = [range(base, base + size) for base, (_, size, _) in driver.memory.items()]
        assert all(any(address in page for page in pages) for address in read)
        driver.end_graph(number)

    run(work)


def test_a_product_looks_for_its_numbers_anew_where_they_may_be_elsewhere():
    """They are remembered from call to call, by what they are."""
    executor = SimpleNamespace(_pages=[], scalar=lambda value, _: places[value])
    plan = object.__new__(CublasLtPlan)
    plan._executor, plan._alpha, plan._beta, plan._scale = executor, ctypes.c_void_p(), ctypes.c_void_p(), F32
    plan._scalars, plan._numbers, plan._pages, plan._vectors = (plan._alpha, plan._beta), (), None, ()
    plan._fast_call = None
    plan.lowered = SimpleNamespace(empty_k=False, offsets=())
    arguments = (*range(7), 2.0, 0.5)
    for places in ({2.0: 1024, 0.5: 2048}, {2.0: 4096, 0.5: 8192}):
        plan.enqueue(arguments)
        assert (plan._alpha.value, plan._beta.value) == tuple(places.values())
        executor._pages = []


def test_what_a_recurrent_network_has_asked_cudnn_for_is_bounded_and_keeps_no_device(monkeypatch):
    class Device:
        def executor(self):
            return None

    def described(_executor, _mode, _network, _layout, lengths, *_):
        asked.append(lengths)
        return SimpleNamespace(reserve=SimpleNamespace(value=len(lengths)))

    def ask(lengths):
        layout = SimpleNamespace(device=device, dtype=F32, shape=SHAPE, strides=(8, 1))
        return rnn.reserve_bytes(None, layout, lengths, None, 0.0)

    monkeypatch.setattr(rnn, "SequenceDescriptors", described)
    monkeypatch.setattr(rnn, "MAX_CACHED", 4)
    device, asked = Device(), []
    for number in range(20):
        assert ask((1,) * number) == ask((1,) * number) == number
        assert len(rnn._cache[device]) <= 4
    assert len(asked) == 20
    gone = weakref.ref(device)
    device = None
    gc.collect()
    assert gone() is None
