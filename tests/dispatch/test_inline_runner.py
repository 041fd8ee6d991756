"""Who waits for a lone request runs it in its worker's place: when, and what comes of faults, interrupts and the like.

The driver's functions for events are replaced, and a plan's launch is a function of the test's; `dp.Supervisor` and its
workers are the real ones. tests/gpu/test_supervisor.py has the same on a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import dispatch as dp
from dispatch.core.request import Request
from dispatch.device.device import Device
from dispatch.device.stream import NOT_READY
from dispatch.errors import DeviceFault
from dispatch.execute.bound import Bound
from dispatch.execute.relocated_graph import MISFIT
from dispatch.keys import Arch
from dispatch.supervise import completion as completion_module
from dispatch.supervise import cuda_worker as worker_module
from dispatch.supervise import inline_runner

PATIENCE = 120  # seconds, on a machine that has other things to do
FAULT = 700


@Request.register
class Work:
    """Gives its number; `ran` are the threads that ran it, `action` is called by its launch and gives the status."""

    bound = None

    def __init__(self, number=0, action=lambda: 0, repeatable=True):
        self.number, self.action, self.repeatable, self.ran = number, action, repeatable, []

    def describe(self):
        return "work"


class Track:
    """A stream: what was enqueued on it, and how much of that the GPU has done."""

    def __init__(self, gpu):
        self.gpu, self.enqueued, self.c_handle = gpu, 0, self

    @property
    def done(self):
        return min(self.enqueued, self.gpu.done)

    def synchronize(self):
        if self.gpu.fault is not None:
            raise self.gpu.fault
        self.gpu.done = 10**9

    def close(self):
        pass


class Executor:
    launches = SimpleNamespace(has_room=True)

    def __init__(self, gpu, stream):
        self.device, self.stream, self.closed, self.plans = gpu, stream, False, {}

    def run(self, request):
        if request.bound is None or request.bound.plans is not self.plans:
            bound = request.bound = Bound.__new__(Bound)
            bound.executor, bound.plans, bound.reads, bound.writes = self, self.plans, (), ()
            bound.plan = SimpleNamespace(launch=lambda _: self.launch(request), capture_safe=True)
            bound.arguments, bound.result, bound._repeatable = (), request.number, None
        status = self.launch(request)
        if status == MISFIT:  # the library's own call
            self.stream.enqueued += 1
        elif status:
            self.device.fail(status, "cuGraphLaunch")
        return request.number

    def launch(self, request):
        request.ran.append(threading.current_thread())
        status = request.action()
        self.stream.enqueued += not status
        return status

    def wait_for_uses(self, reads, writes):
        pass

    def learn(self):
        return False

    def relocation_stats(self):
        return {}

    def release(self):
        pass

    def close(self):
        self.closed = True


class Gpu(Device):
    is_host = False
    context = nullcontext()

    def __init__(self):
        super().__init__("cuda:0", 0, Arch(90), 1)
        self.status, self.done = 0, 10**9
        self.unseen_by = None  # a thread that sees nothing of it in the time for which it looks

    def activate(self):
        pass

    def stream(self):
        return Track(self)

    def executor(self, stream=None):
        return Executor(self, stream)

    def event(self):
        return SimpleNamespace(at=None)

    def recycle(self, event):
        pass

    def fail(self, status, function):
        if self.fault is None:
            self.fault = DeviceFault(f"{self.name} is lost to this process: {function} {status}")
        raise self.fault


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()

    def record(event, track):
        event.at = track, track.enqueued
        return gpu.status

    def query(event):
        track, position = event.at
        if gpu.unseen_by is threading.current_thread():
            return NOT_READY
        return gpu.status or (0 if track.done >= position else NOT_READY)

    driver = SimpleNamespace(
        CUstreamCaptureMode=SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=2),
        cuThreadExchangeStreamCaptureMode=lambda mode: mode,
        cuEventRecord=SimpleNamespace(unchecked=record, unchecked_holding_gil=record),
        cuEventQuery=SimpleNamespace(unchecked_holding_gil=query),
        cuStreamQuery=SimpleNamespace(unchecked=lambda _track: gpu.status or NOT_READY),
    )
    for module in (worker_module, completion_module, inline_runner):
        monkeypatch.setattr(module, "driver", driver)
    return gpu


@pytest.fixture
def unhurried():
    """A thread goes on until it waits: who waits for a lone request then comes to it before the worker that it woke."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        pytest.skip("without the interpreter's lock either may be the first")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def sup(gpu, unhurried):  # noqa: ARG001
    with dp.Supervisor(gpu, streams=1) as sup:
        yield sup
        gpu.done, gpu.unseen_by = 10**9, None  # so that a test that failed ends, too


def known(sup, **options):
    """A request that its worker has run once."""
    work = Work(**options)
    assert sup.submit(work).result(PATIENCE) == work.number
    assert work.ran.pop() is sup._pool.queues[0].worker.thread
    at_rest(sup)
    return work


def at_rest(sup):
    """Wait until the worker sleeps."""
    ends = threading.Event()
    while not sup._pool.queues[0].asleep:
        ends.wait(0.001)


def test_who_waits_for_a_lone_request_that_has_run_before_runs_it(sup):
    work = known(sup, number=7)
    for _ in range(5):
        assert sup.submit(work).result(PATIENCE) == 7
    assert work.ran == [threading.current_thread()] * 5
    assert sup.stats().done == 6
    assert sup.stats().running == sup.stats().queued == 0


def test_one_that_is_not_lone_or_waited_for_is_left_to_its_worker(sup):
    work, other = known(sup), known(sup)
    first, second = sup.submit(work), sup.submit(other)
    assert first.result(PATIENCE) == second.result(PATIENCE) == 0
    worker = sup._pool.queues[0].worker.thread
    assert work.ran == other.ran == [worker]
    at_rest(sup)
    alone = sup.submit(work)
    while not alone.done():
        threading.Event().wait(0.001)
    assert work.ran == [worker] * 2


def test_one_whose_second_run_would_not_give_the_same_is_left_to_its_worker(sup):
    work = known(sup, repeatable=False)
    assert sup.submit(work).result(PATIENCE) == 0
    assert work.ran == [sup._pool.queues[0].worker.thread]


def test_what_takes_longer_is_handed_to_the_worker(sup, gpu):
    work = known(sup, number=3)
    gpu.done = 1
    future = sup.submit(work)
    with pytest.raises(TimeoutError):
        future.result(0.05)
    assert work.ran == [threading.current_thread()]
    assert future.running()
    assert sup.stats().running == 1
    behind = sup.submit(known_later := Work(4))
    gpu.done = 10**9
    assert (future.result(PATIENCE), behind.result(PATIENCE)) == (3, 4)
    assert known_later.ran == [sup._pool.queues[0].worker.thread]
    assert sup.stats().done == 3
    assert sup.stats().running == 0


def test_where_requests_take_longer_ever_more_are_left_to_the_worker(sup, gpu):
    me, work = threading.current_thread(), known(sup)
    gpu.unseen_by = me
    for _ in range(100):
        sup.submit(work).result(PATIENCE)
        at_rest(sup)
    assert 1 <= work.ran.count(me) <= 8
    gpu.unseen_by = None
    work.ran.clear()
    for _ in range(200):
        sup.submit(work).result(PATIENCE)
    assert work.ran[-1] is me, "those that do not are run here again"


def test_what_does_not_launch_as_before_is_run_by_its_worker(sup):
    statuses = [0]
    work = known(sup, number=5, action=lambda: statuses[-1])
    statuses.append(MISFIT)
    assert sup.submit(work).result(PATIENCE) == 5
    assert work.ran == [threading.current_thread(), sup._pool.queues[0].worker.thread]


@pytest.mark.parametrize("when", ["launch", "event"])
@pytest.mark.usefixtures("unhurried")
def test_a_fault_is_the_workers_to_tell(gpu, when):
    sup = dp.Supervisor(gpu, streams=1)

    def break_down():
        gpu.status = FAULT if broken else 0
        return gpu.status if when == "launch" else 0

    broken = []
    work = known(sup, action=break_down)
    broken.append(True)
    future = sup.submit(work)
    with pytest.raises(DeviceFault):
        future.result(PATIENCE)
    assert work.ran[0] is threading.current_thread()
    with pytest.raises(DeviceFault):
        sup.submit(work)
    sup.close()


def test_callbacks_run_on_the_workers_thread(sup):
    work, told = known(sup), []
    future = sup.submit(work)
    future.add_done_callback(lambda _: told.append(threading.current_thread()))
    future.result(PATIENCE)
    at_rest(sup)
    assert told == [sup._pool.queues[0].worker.thread]
    assert len(work.ran) == 1


@pytest.mark.usefixtures("unhurried")
def test_who_closes_the_supervisor_while_it_runs_a_request_does_not_wait_for_itself(gpu):
    sup = dp.Supervisor(gpu, streams=1)
    closing = []

    def close():
        if closing:
            sup._pool.finish()
        return 0

    work = known(sup, number=2, action=close)
    closing.append(True)
    assert sup.submit(work).result(PATIENCE) == 2
    assert work.ran[0] is threading.current_thread()
    sup.close()
    assert not sup._pool.queues[0].worker.thread.is_alive()


@pytest.fixture
def interrupts(rng):
    spec = importlib.util.spec_from_file_location("interrupts", Path(__file__).with_name("interrupts.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["interrupts"] = module
    spec.loader.exec_module(module)
    yield module.Interrupts(1, rng)
    del sys.modules["interrupts"]


@pytest.mark.parametrize("takes_long", [False, True])
def test_an_interrupt_anywhere_ends_the_request_once_and_leaves_the_worker_to_itself(sup, gpu, interrupts, takes_long):
    work, quiet, count, ended = known(sup, number=9), 0, 0, 1
    while quiet < 2:
        given = []

        def wait(given=given):
            given.append(sup.submit(work))
            given[0].result(PATIENCE)

        begun = len(work.ran)
        if takes_long:
            sup._pool.queues[0].worker._inline_runner._skips_left = 0
            gpu.unseen_by = threading.current_thread()
        if interrupts.run(wait):
            count, quiet = count + 1, 0
        else:
            quiet += 1
        assert all(future.result(PATIENCE) == 9 for future in given), interrupts.place
        if not given:  # what nobody was given is withdrawn, or has run, and is found with the next
            assert sup.submit(work).result(PATIENCE) == 9
        at_rest(sup)
        queue = sup._pool.queues[0]
        assert not queue.worker._inline_runner._lock.locked(), interrupts.place
        assert queue.worker._inline_runner.batch is None, interrupts.place
        assert (len(queue.pending), queue.busy) == (0, 0), interrupts.place
        assert len(work.ran) - begun <= 2, interrupts.place
        ended += 1
        assert ended <= sup.stats().done <= ended + (not given), interrupts.place
        ended = sup.stats().done
    print(f"{count} places")
    assert count > 30


def test_many_threads_that_wait_each_for_its_own_have_all_their_results(gpu):
    with dp.Supervisor(gpu, streams=2) as sup:

        def go(number):
            works = [Work(number * 100 + i) for i in range(5)]
            found[number] = [sup.submit(works[i % 5]).result(PATIENCE) - number * 100 for i in range(200)]

        found = {}
        threads = [threading.Thread(target=go, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert [found[number] for number in range(6)] == [[i % 5 for i in range(200)]] * 6
        assert sup.stats().done == 1200
        assert sup.stats().failed == 0
