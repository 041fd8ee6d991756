"""An executor: what it enqueues is behind conflicting uses on other streams, and what it keeps is what it says."""

import ctypes
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from weakref import ref

import pytest

from dispatch.core.request import Plan
from dispatch.device.cuda import CudaDevice
from dispatch.errors import WorkerFailed
from dispatch.execute import cuda_executor, relocations
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.keys import F32


class Nothing(Plan):
    """Enqueues nothing of its own; who uses it says what it would."""

    __slots__ = ()

    def enqueue(self, arguments):
        assert arguments


@pytest.fixture
def run(stand_in):
    """`run(work)`: call `work(driver, device)` on a thread of its own, which has no context and no executors."""
    driver = stand_in(1)

    def on_a_thread(work):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: work(driver, CudaDevice(0, 1))).result()

    return on_a_thread


class Within(Plan):
    """Its call is interrupted by `action`, as by a finalizer, before it notes its arguments."""

    __slots__ = ("action", "made")

    def __init__(self):
        super().__init__(SimpleNamespace(name="a row"), capture_safe=False)
        self.action, self.made = lambda: None, []

    def enqueue(self, arguments):
        action, self.action = self.action, lambda: None
        action()
        self.made.append(arguments)


def test_a_call_from_within_a_call_of_the_same_plan_is_refused(run):
    """The outer one has set some of its addresses, which the library is yet to read."""

    def work(driver, dev):
        executor, plan, other = CudaExecutor(dev.stream()), Within(), Within()
        refused = []

        def inner():
            with pytest.raises(WorkerFailed, match="a row was called from a finalizer or a signal handler"):
                executor.call(plan, (2,))
            executor.call(other, (3,))
            CudaExecutor(dev.stream()).call(Within(), (4,))
            refused.append(True)

        plan.action = inner
        executor.call(plan, (1,))
        assert (plan.made, other.made, refused) == ([(1,)], [(3,)], [True])
        assert driver.thread.mode == 0, "each call gives back the capture mode that it found, one within another, too"
        executor.call(plan, (5,))
        other.action = lambda: executor.call(plan, (6,))

        def innermost():
            with pytest.raises(WorkerFailed):
                executor.call(other, (7,))

        plan.action = innermost
        executor.call(other, (8,))
        assert (plan.made, other.made) == ([(1,), (5,), (6,)], [(3,), (8,)])

    run(work)


def test_a_call_that_an_interrupt_left_noted_is_over(run):
    def work(_, dev):
        executor, plan = CudaExecutor(dev.stream()), Within()
        executor._calling.add(plan)
        executor.call(plan, (1,))
        assert plan.made == [(1,)]
        assert not executor._calling

    run(work)


class User:
    """An executor on a stream of its own that reads or writes tensors by one plan."""

    def __init__(self, driver, dev):
        self.driver, self.executor, self.plan = driver, CudaExecutor(dev.stream()), Nothing(None, capture_safe=True)
        self.handle = self.executor.stream.c_handle.value

    def use(self, kind, tensor):
        reads, writes = ((tensor,), ()) if kind == "reads" else ((), (tensor,))
        self.executor.enqueue(self.plan, (tensor.ptr,), reads, writes)
        self.driver.step(self.handle)

    @property
    def clock(self):
        return Counter(self.driver.clock(self.handle))


@pytest.mark.parametrize("is_recorded", [False, True], ids=["called", "recorded"])
@pytest.mark.parametrize(("before", "now"), [("writes", "reads"), ("reads", "writes"), ("writes", "writes")])
def test_a_use_is_behind_what_it_conflicts_with_on_another_stream(run, is_recorded, before, now):
    def work(driver, dev):
        first, second = User(driver, dev), User(driver, dev)
        tensor = dev.zeros((4, 8))
        if is_recorded:
            for user in (first, second):
                assert user.executor.relocate(user.plan, (tensor.ptr,)) == ""
                assert user.plan.launch
        launched = len(driver.launched)
        first.use(before, tensor)
        until = first.clock
        second.use(now, tensor)
        assert not until - second.clock
        assert len(driver.launched) - launched == (2 if is_recorded else 0)

    run(work)


def test_reads_on_two_streams_do_not_wait_for_each_other(run):
    def work(driver, dev):
        first, second = User(driver, dev), User(driver, dev)
        tensor = dev.zeros((4, 8))
        for _ in range(3):
            first.use("reads", tensor)
            until = first.clock
            second.use("reads", tensor)
            assert until - second.clock

    run(work)


def test_an_executor_keeps_as_many_graphs_as_it_may_and_lets_the_oldest_go(run, monkeypatch):
    monkeypatch.setattr(relocations, "MAX_GRAPHS", 2)

    def work(driver, dev):
        user = User(driver, dev)
        plans = [Nothing(SimpleNamespace(name="of this test"), capture_safe=True) for _ in range(4)]
        for plan in plans:
            assert user.executor.relocate(plan, (dev.zeros(8).ptr,)) == ""
        assert [plan.launch is not None for plan in plans] == [False, False, True, True]
        assert user.executor.relocation_stats()["relocated"] == 2
        user.plan = plans[0]
        user.use("reads", dev.zeros(8))  # by its library, until it is learnt again
        assert user.executor.relocate(plans[0], (dev.zeros(8).ptr,)) == ""
        assert [plan.launch is not None for plan in plans] == [True, False, False, True]

    run(work)


def test_numbers_in_device_memory_are_right_and_apart_on_every_page(run, monkeypatch):
    monkeypatch.setattr(cuda_executor, "SCALARS_PER_PAGE", 2)

    def work(driver, dev):
        executor = dev.executor()
        places = [executor.scalar(float(number), F32) for number in range(5)]
        assert [ctypes.c_float.from_address(place).value for place in places] == [0, 1, 2, 3, 4]
        assert [executor.scalar(float(number), F32) for number in range(5)] == places
        for place in places:
            assert any(base <= place and place + 16 <= base + size for base, (_, size, _) in driver.memory.items())

    run(work)


def test_a_number_that_a_finalizer_needs_while_another_is_written_has_its_own_place(run, monkeypatch):
    monkeypatch.setattr(cuda_executor, "SCALARS_PER_PAGE", 4)

    def work(_, dev):
        executor = dev.executor()
        write, inner = executor.write, []

        def entered(address, value, dtype):
            if inner:
                executor.scalar(inner.pop(), dtype)
            write(address, value, dtype)
            if later:
                executor.scalar(later.pop(), dtype)

        executor.write = entered
        for number in range(0, 18, 3):
            inner, later = [number + 1.0], [number + 2.0]
            executor.scalar(float(number), F32)
        places = {number: executor.scalar(float(number), F32) for number in range(18)}
        assert [ctypes.c_float.from_address(place).value for place in places.values()] == [*range(18)]
        assert len(set(places.values())) == 18

    run(work)


def test_zeros_that_could_not_be_set_are_not_given_out(run, monkeypatch):
    def work(driver, dev):
        carry_out, asked = driver._cuMemsetD8Async, []

        def set_later(to, *given):
            asked.append(to)
            if len(asked) == 1:
                raise InterruptedError
            return carry_out(to, *given)

        monkeypatch.setattr(type(driver), "_cuMemsetD8Async", lambda _, *given: set_later(*given))
        executor = dev.executor()
        with pytest.raises(InterruptedError):
            executor.zeros(64)
        assert executor.zeros(64) == asked[-1]
        assert len(asked) == 2

    run(work)


def test_zeros_are_zeros_and_made_anew_only_where_more_are_asked_for(run):
    def work(driver, dev):
        executor = dev.executor()
        few = executor.zeros(64)
        assert driver.memory[few][1] >= 64
        assert ctypes.string_at(few, 64) == bytes(64)
        assert executor.zeros(32) == few
        many = executor.zeros(128)
        assert driver.memory[many][1] >= 128
        assert few in driver.memory, "captured calls may still read them"

    run(work)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_what_prepared_calls_hold_addresses_of_is_not_let_go(run, is_prepared):
    def work(_, dev):
        executor = dev.executor()
        assert executor.zeros(64)
        assert executor.scalar(2.0, F32)
        executor.prepared = is_prepared
        executor.release()
        assert [bool(kept) for kept in (executor._zeros, executor._pages, executor._scalars)] == [is_prepared] * 3

    run(work)


def test_what_is_forgotten_lets_its_graphs_go_at_once(run):
    """Not only where the device is released: a plan that is chosen anew would add one to those of all before it."""

    def work(driver, dev):
        user, tensor = User(driver, dev), dev.zeros((4, 8))
        executor, kept, graphs = user.executor, user.plan, []
        for number in range(20):
            plan = executor.plans[number] = Nothing(None, capture_safe=True)
            executor.relocations.wait(plan, (tensor.ptr,))
            assert executor.relocate(plan, (tensor.ptr,)) == ""
            graphs.append(ref(plan.relocation.graphs[0]))
            del plan
        assert executor.relocate(kept, (tensor.ptr,)) == ""
        assert executor.relocation_stats()["relocated"] == 21
        executor.forget()
        assert executor.relocation_stats()["relocated"] == 1, "that of the plan which somebody has"
        assert all(graph() is None for graph in graphs)
        assert kept.launch

    run(work)
