"""The three ways to learn that a stream has passed an event, against a driver whose events the test ends by hand.

tests/gpu/test_supervisor.py runs all three on the real driver, and with real faults.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from types import SimpleNamespace

import pytest

from dispatch.device.stream import NOT_READY
from dispatch.errors import DeviceFault
from dispatch.supervise import completion as completion_module
from dispatch.supervise.batch import Batch
from dispatch.supervise.completion import COMPLETIONS, Blocking, Callback, Polling
from dispatch.supervise.queue import WorkerQueue

PATIENCE = 120  # seconds, on a machine that has other things to do
FAULT = 700
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # CUhostFn


class Gpu:
    """Events are numbers; the test says when each is complete, and with what."""

    def __init__(self):
        self.fault = None
        self.numbers = iter(range(1, 100))
        self.status = {}
        self.ends = {number: threading.Event() for number in range(1, 100)}
        self.callbacks = queue.SimpleQueue()
        self.destroyed = []
        self.CUevent_flags = SimpleNamespace(CU_EVENT_BLOCKING_SYNC=1, CU_EVENT_DISABLE_TIMING=2)
        self.cuEventQuery = SimpleNamespace(unchecked_holding_gil=lambda event: self.status.get(event.value, NOT_READY))
        self.cuEventSynchronize = SimpleNamespace(unchecked=self.synchronize)
        self.cuLaunchHostFunc = SimpleNamespace(unchecked=self.launch)

    def __str__(self):
        return "gpu"

    def cuEventCreate(self, flags):
        assert flags == 3, "an event to wait for asleep, without timing"
        return next(self.numbers)

    def cuEventDestroy(self, event):
        self.destroyed.append(event)

    def event(self):
        return ctypes.c_void_p(next(self.numbers))

    def recycle(self, event):
        pass

    def activate(self):
        pass

    def synchronize(self, event):
        assert self.ends[event.value].wait(PATIENCE)
        return self.status[event.value]

    def launch(self, stream, function, data):
        self.callbacks.put((function, data))
        return 0

    def fail(self, status, function):
        self.fault = DeviceFault(f"{function}: {status}")
        raise self.fault

    def end(self, batch, status=0, *, called=True):
        """The stream has passed a batch; after a fault no callback is called."""
        self.status[batch.event.value] = status
        self.ends[batch.event.value].set()
        if called and not self.callbacks.empty():
            function, data = self.callbacks.get()
            thread = threading.Thread(target=HOST_FUNCTION(function.value), args=(data,))
            thread.start()
            thread.join(PATIENCE)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(completion_module, "driver", gpu)
    return gpu


@pytest.fixture(params=[Polling, Blocking, Callback])
def way(request, gpu):
    queue = WorkerQueue(0, 1)
    made = request.param(gpu, queue, SimpleNamespace(c_handle=ctypes.c_void_p(7)))
    yield made
    made.close()


def fly(way):
    batch = Batch(way.event())
    batch.futures = [None]
    way.watch(batch)
    return batch


def wait_for(way, batch, *, full=False):
    """As a worker does: look, pause, look again."""
    batches = deque([batch])
    while not way.ended(batch):
        way.pause(batches, full=full)


def test_all_three_have_a_name():
    assert list(COMPLETIONS.values()) == [Polling, Blocking, Callback]


@pytest.mark.parametrize("full", [False, True])
def test_a_batch_has_ended_when_its_event_is_complete_and_not_before(gpu, way, full):
    one, two = fly(way), fly(way)
    assert not way.ended(one)
    gpu.end(one)
    wait_for(way, one, full=full)
    assert not way.ended(two)
    threading.Timer(0.01, gpu.end, [two]).start()
    wait_for(way, two, full=full)
    way.recycle(one.event)
    way.recycle(two.event)


@pytest.mark.parametrize("called", [False, True])
def test_what_a_batch_ended_in_is_the_events_status(gpu, way, called):
    batch = fly(way)
    gpu.end(batch, FAULT, called=called)
    with pytest.raises(DeviceFault, match=r"cuEvent.*: 700"):
        wait_for(way, batch)


def test_a_pause_ends_when_something_is_queued_unless_there_is_no_room_for_it(gpu, way):
    batch = fly(way)
    way._queue.pending.append(None)
    way.pause(deque([batch]), full=False)
    assert not way.ended(batch)
    gpu.end(batch)
    wait_for(way, batch, full=True)


def test_a_waiter_ends_with_its_worker_and_its_events_are_destroyed(gpu):
    way = Blocking(gpu, WorkerQueue(3, 1), None)
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "dispatch gpu waiter 3"]
    batch = fly(way)
    gpu.end(batch)
    wait_for(way, batch)
    way.recycle(batch.event)
    assert way.event() is batch.event
    way.recycle(batch.event)
    way.close()
    assert not thread.is_alive()
    assert gpu.destroyed == [batch.event.value]


def test_a_callback_that_comes_late_finds_nobody(gpu):
    way = Callback(gpu, WorkerQueue(0, 1), SimpleNamespace(c_handle=None))
    batch = fly(way)
    way.close()
    gpu.end(batch)
    assert way._called == 0


def test_a_host_function_is_none_of_pythons(gpu):
    """Whoever holds the interpreter's lock may wait in the driver for what comes behind the host function."""
    way = Callback(gpu, WorkerQueue(0, 1), SimpleNamespace(c_handle=None))
    batch = fly(way)
    function, data = gpu.callbacks.get()
    assert function.value == ctypes.cast(ctypes.CDLL(None).sem_post, ctypes.c_void_p).value
    holding = ctypes.PyDLL(None).sem_post  # which does not let go of the lock
    holding(data)
    gpu.end(batch, called=False)
    wait_for(way, batch)
    assert way._called == 1
    way.close()
