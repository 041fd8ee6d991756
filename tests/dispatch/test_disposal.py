"""Where finalizers destroy: on the thread they come by on, or, while a world of threads is open, on one of its own."""

import gc
import os
import sys
import threading
from types import SimpleNamespace

import pytest

import dispatch as dp
from dispatch.device import disposal
from dispatch.device.disposal import dispose, start_disposal_thread, stop_disposal_thread
from dispatch.libraries.finalizer import finalizer


class Thing:
    """Something that a library would have made."""

    def __init__(self, told):
        self.told = told

    @finalizer
    def __del__(self):
        self.told.append(threading.current_thread().name)


@pytest.fixture
def apart():
    start_disposal_thread()
    yield
    stop_disposal_thread()
    assert disposal._disposal is None


def test_alone_it_is_destroyed_at_once_and_here():
    told = []
    Thing(told)
    assert told == [threading.current_thread().name]


def test_within_a_world_of_threads_nobody_waits_for_what_is_destroyed():
    """What is destroyed waits here for the very rank that it was collected on, as a GPU does for its collective."""
    came, told = threading.Event(), []

    class Busy(Thing):
        @finalizer
        def __del__(self):
            assert came.wait(60)
            self.told.append(threading.current_thread().name)

    def rank(world):
        if world.rank:
            cycle = Busy(told)
            cycle.itself = cycle
            del cycle
            gc.collect()
            assert not told
            came.set()
        return float(dp.all_reduce(world.device.array([1.0]), comm=world.communicator).numpy()[0])

    with dp.World.local(["host"] * 2, deadline=60) as world:
        assert world.run(rank) == [2.0, 2.0]
    assert told == ["disposal"]  # the world's end waits for it
    Thing(told)
    assert told[1:] == [threading.current_thread().name]


@pytest.mark.usefixtures("apart")
def test_one_behind_the_other_and_what_they_own_in_the_same_place():
    told, order = [], []
    for number in range(100):
        dispose(order.append, number)

    class Owner(Thing):
        pass

    owner = Owner(told)
    owner.inner = Thing(told)
    del owner
    stop_disposal_thread()
    start_disposal_thread()
    assert order == [*range(100)]
    assert told == ["disposal"] * 2


@pytest.mark.usefixtures("apart")
def test_an_error_is_told_and_the_next_is_destroyed(monkeypatch):
    told, order = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append((raised.exc_type, str(raised.exc_value))))

    def fails(_):
        raise RuntimeError("in use")

    dispose(fails, None)
    dispose(order.append, 1)
    stop_disposal_thread()
    start_disposal_thread()
    assert told == [(RuntimeError, "in use")]
    assert order == [1]


@pytest.mark.usefixtures("apart")
def test_worlds_within_a_world_end_one_by_one():
    start_disposal_thread()
    stop_disposal_thread()
    told = []
    Thing(told)
    stop_disposal_thread()
    start_disposal_thread()
    assert told == ["disposal"]


@pytest.mark.usefixtures("apart")
def test_a_forked_child_destroys_by_itself():
    child = os.fork()
    if not child:
        told = []
        Thing(told)
        stop_disposal_thread()
        os._exit(int(told != [threading.current_thread().name]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Communicator:
    """One over a GPU, which is told what it waits for."""

    def __init__(self, name, device, told):
        self.name, self.device, self.told, self.is_idle = name, device, told, True

    def wait_for_work(self, seconds):
        self.told.append((self.name, seconds))
        return True


def test_a_plan_waits_for_the_collectives_of_its_gpu_while_threads_are_ranks():
    here, there, told = object(), object(), []
    ranks = [Communicator(*given, told) for given in (("first", here), ("elsewhere", there), ("second", here))]
    for rank in ranks:
        disposal.register_collectives(rank)
    del rank
    disposal.wait_for_collectives(here)
    assert told == [], "ranks of other processes have locks of their own"
    start_disposal_thread()
    try:
        disposal.wait_for_collectives(here)
        assert sorted(told) == [("first", disposal.LOADING), ("second", disposal.LOADING)]
        told.clear()
        del ranks[0]
        gc.collect()
        disposal.wait_for_collectives(here)
        assert told == [("second", disposal.LOADING)]
    finally:
        stop_disposal_thread()


def test_nothing_is_destroyed_between_the_beginning_of_a_collective_and_its_end():
    """In the driver, what destroys waits for the GPU and holds what the thread of another rank then waits for."""
    rank, destroyed = Communicator("rank", object(), []), threading.Event()
    disposal.register_collectives(rank)
    start_disposal_thread()
    try:
        with disposal.enqueueing_collectives():
            dispose(lambda _: destroyed.set(), None)
            assert not destroyed.wait(0.1)
            rank.is_idle = False
        assert not destroyed.wait(0.1)
        rank.is_idle = True
        assert destroyed.wait(60)
    finally:
        rank.is_idle = True
        stop_disposal_thread()


def test_a_collective_that_begins_while_the_driver_is_asked_is_not_waited_for_by_its_rank():
    """The driver may take long to say whether another communicator is idle; then nothing is destroyed."""
    asked, may_answer, destroyed = threading.Event(), threading.Event(), threading.Event()

    class Slow(Communicator):
        is_idle = property(lambda _: (asked.set(), may_answer.wait(60), True)[-1], lambda *_: None)

    rank = Slow("rank", object(), [])
    disposal.register_collectives(rank)
    start_disposal_thread()
    try:
        dispose(lambda _: destroyed.set(), None)
        assert asked.wait(60)
        with disposal.enqueueing_collectives():
            may_answer.set()
            assert not destroyed.wait(0.1)
        assert destroyed.wait(60)
    finally:
        may_answer.set()
        stop_disposal_thread()


@pytest.mark.usefixtures("apart")
def test_a_collective_begins_once_an_object_is_destroyed():
    began, may_end, order = threading.Event(), threading.Event(), []

    def destroy(_):
        began.set()
        assert may_end.wait(60)
        order.append("destroyed")

    def enqueue():
        with disposal.enqueueing_collectives():
            order.append("enqueued")

    dispose(destroy, None)
    assert began.wait(60)
    rank = threading.Thread(target=enqueue)
    rank.start()
    rank.join(0.1)
    assert not order
    may_end.set()
    rank.join()
    assert order == ["destroyed", "enqueued"]


@pytest.mark.usefixtures("apart")
def test_a_collective_does_not_wait_for_ever_for_what_is_destroyed(monkeypatch):
    """A kernel that never ends keeps the driver; the collective has a deadline of its own."""
    monkeypatch.setattr(disposal, "DESTROYING", 0.05)
    began, may_end = threading.Event(), threading.Event()
    dispose(lambda _: (began.set(), may_end.wait(60)), None)
    assert began.wait(60)
    with disposal.enqueueing_collectives():
        assert not may_end.is_set()
    may_end.set()


def test_kernels_are_loaded_at_once_where_threads_are_ranks_alone(monkeypatch):
    loaded = []
    monkeypatch.setattr(disposal, "driver", SimpleNamespace(cuFuncLoad=SimpleNamespace(unchecked=loaded.append)))
    disposal.load_kernel(5)
    start_disposal_thread()
    try:
        disposal.load_kernel(7)
    finally:
        stop_disposal_thread()
    assert [function.value for function in loaded] == [7]
