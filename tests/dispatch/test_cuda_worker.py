"""The GPU's worker against a stream that the test moves on by hand: when futures end, and with what.

The driver's two event functions are replaced; tests/gpu/test_supervisor.py runs the same worker on the real one.
"""

import ctypes
import itertools
import threading
from types import SimpleNamespace

import pytest

import dispatch as dp
from cudabind.errors import CublasLtError
from dispatch.core.request import Request
from dispatch.device.device import Device
from dispatch.device.stream import NOT_READY
from dispatch.errors import BadRequest, DeviceFault, OutOfMemory, WorkerFailed
from dispatch.keys import Arch
from dispatch.supervise import completion as completion_module
from dispatch.supervise import cuda_worker as worker_module
from dispatch.supervise.cuda_worker import BATCH, IN_FLIGHT

PATIENCE = 120  # seconds, on a machine that has other things to do
FAULT = 700


@Request.register
class Work:
    """Runs a function when it is enqueued; its result is that function's."""

    __module__ = "dispatch.work"  # what it raises is a defect, and no error of a user's class

    def __init__(self, action=lambda: None):
        self.action = action

    def describe(self):
        return "work"


class Track:
    """A stream: what was enqueued on it, and how much of that the GPU has done."""

    def __init__(self, device):
        self.device, self.enqueued, self.done = device, 0, 0
        self.c_handle = self
        self.closed = False
        self.waits = []

    def wait_for(self, other):
        self.waits.append((self.enqueued, other, other.enqueued))

    def synchronize(self):
        if self.device.fault is not None:
            raise self.device.fault
        self.done = self.enqueued

    def close(self):
        self.closed = True


class Executor:
    def __init__(self, device, stream):
        self.device, self.stream, self.closed, self.forgotten = device, stream, False, 0

    def run(self, request):
        result = request.action()
        self.stream.enqueued += 1
        return result

    def learn(self):
        return False

    def relocation_stats(self):
        return {}

    def release(self):
        self.forgotten += 1

    def close(self):
        self.closed = True


class Gpu(Device):
    is_host = False

    def __init__(self):
        super().__init__("cuda:0", 0, Arch(90), 1)
        self.tracks, self.executors, self.recycled = [], [], []
        self.status = 0

    def activate(self):
        pass

    def stream(self):
        self.tracks.append(Track(self))
        return self.tracks[-1]

    def executor(self, stream=None):
        self.executors.append(Executor(self, stream))
        return self.executors[-1]

    def event(self):
        return SimpleNamespace(at=None)

    def recycle(self, event):
        self.recycled.append(event)

    def fail(self, status, function):
        if self.fault is None:
            self.fault = DeviceFault(f"{self.name} is lost to this process: {function} {status}")
        raise self.fault


class Driver:
    """`cuEventRecord`, `cuEventQuery` and `cuStreamQuery` over tracks."""

    def __init__(self, gpu):
        self.gpu, self.looked = gpu, threading.Event()
        self.CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED=ctypes.c_int(2))
        self.cuThreadExchangeStreamCaptureMode = lambda mode: mode
        self.cuEventRecord = SimpleNamespace(unchecked=self.record)
        self.cuEventQuery = SimpleNamespace(unchecked_holding_gil=self.query)
        self.cuStreamQuery = SimpleNamespace(unchecked=lambda _track: gpu.status or NOT_READY)

    def record(self, event, track):
        event.at = (track, track.enqueued)
        return self.gpu.status

    def query(self, event):
        self.looked.set()
        track, position = event.at
        return self.gpu.status or (0 if track.done >= position else NOT_READY)


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    gpu.driver = Driver(gpu)
    for module in (worker_module, completion_module):
        monkeypatch.setattr(module, "driver", gpu.driver)
    return gpu


def looked_at(gpu):
    """Wait until a worker has looked at an event once more, from now on."""
    for _ in range(2):  # the first look may have begun before
        gpu.driver.looked.clear()
        assert gpu.driver.looked.wait(PATIENCE)


def test_a_future_ends_when_the_gpu_has_passed_its_work_and_not_before(gpu):
    with dp.Supervisor(gpu, streams=1) as sup:
        futures = sup.submit_many([Work(lambda i=i: i) for i in range(5)])
        looked_at(gpu)
        assert not any(future.done() for future in futures)
        assert all(future.running() for future in futures)
        assert sup.stats().running == 5
        gpu.tracks[0].done = 5
        assert [future.result(PATIENCE) for future in futures] == list(range(5))
        assert sup.stats().running == 0
    assert gpu.executors[0].closed
    assert gpu.tracks[0].closed


def test_new_requests_are_enqueued_while_older_ones_run(gpu):
    with dp.Supervisor(gpu, streams=1) as sup:
        first = sup.submit(Work())
        looked_at(gpu)
        entered = threading.Event()
        second = sup.submit(Work(entered.set))
        assert entered.wait(PATIENCE)
        gpu.tracks[0].done = 1
        first.result(PATIENCE)
        assert not second.done()
        gpu.tracks[0].done = 2
        second.result(PATIENCE)


def test_what_runs_after_another_is_enqueued_behind_its_event_while_that_one_runs(gpu):
    with dp.Supervisor(gpu, streams=2) as sup:
        hold, entered = threading.Event(), threading.Event()
        held = sup.submit(Work(lambda: (entered.set(), hold.wait(PATIENCE))), worker=0)
        assert entered.wait(PATIENCE)
        first = sup.submit(Work(lambda: "first"), worker=0)
        second = sup.submit(Work(lambda: "second"), worker=1, after=[first])
        third = sup.submit(Work(lambda: "third"), worker=0, after=[second])
        hold.set()
        while sum(track.enqueued for track in gpu.tracks) < 4:
            looked_at(gpu)
        assert not any(future.done() for future in (held, first, second, third))
        zero, one = (queue.worker.executor.stream for queue in sup._pool.queues)
        assert one.waits == [(0, zero, 2)], "its stream was told to wait before it was given anything"
        assert zero.waits == [(2, one, 1)]
        for track in gpu.tracks:
            track.done = 3
        assert [future.result(PATIENCE) for future in (first, second, third)] == ["first", "second", "third"]


def test_one_event_is_behind_a_batch_and_no_more_than_so_many_are_in_flight(gpu):
    with dp.Supervisor(gpu, streams=1, queue_size=10_000) as sup:
        hold, entered = threading.Event(), threading.Event()
        sup.submit(Work(lambda: (entered.set(), hold.wait(PATIENCE))))
        assert entered.wait(PATIENCE)  # before that it may have no stream yet
        futures = sup.submit_many([Work() for _ in range(3 * IN_FLIGHT)])
        hold.set()
        while gpu.tracks[0].enqueued < IN_FLIGHT:
            looked_at(gpu)
        looked_at(gpu)
        assert IN_FLIGHT <= gpu.tracks[0].enqueued < IN_FLIGHT + BATCH
        assert sup.stats().queued >= 2 * IN_FLIGHT - BATCH
        gpu.tracks[0].done = 10**9
        futures[-1].result(PATIENCE)
    assert len(gpu.recycled) <= 2 + 3 * IN_FLIGHT // BATCH


def test_a_request_that_fails_is_not_in_the_batch_of_the_others(gpu):
    def refuse():
        raise BadRequest("a", "this", "that")

    with dp.Supervisor(gpu, streams=1) as sup:
        hold = threading.Event()
        sup.submit(Work(lambda: hold.wait(PATIENCE)))
        one, bad, two = sup.submit_many([Work(lambda: 1), Work(refuse), Work(lambda: 2)])
        back = sup.submit(Work())
        assert back.cancel()
        hold.set()
        assert isinstance(bad.exception(PATIENCE), BadRequest)
        assert not one.done()
        gpu.tracks[0].done = 3
        assert (one.result(PATIENCE), two.result(PATIENCE)) == (1, 2)
    assert gpu.tracks[0].enqueued == 3


def test_a_callback_of_what_failed_keeps_no_other_worker_from_enqueueing(gpu):
    def refuse():
        raise BadRequest("a", "this", "that")

    def starve():
        gpu.tracks[0].done = 10**9
        raise MemoryError("none left")

    with dp.Supervisor(gpu, streams=2) as sup:
        hold, told = threading.Event(), []
        sup.submit(Work(lambda: hold.wait(PATIENCE)), worker=0)
        futures = [sup.submit(Work(action), worker=0) for action in (lambda: 1, refuse, starve)]
        for future in futures:  # the first ends as memory is looked for
            future.add_done_callback(lambda _: told.append(sup._pool.launch_lock.locked()))
        hold.set()
        assert futures[0].result(PATIENCE) == 1
        assert isinstance(futures[1].exception(PATIENCE), BadRequest)
        assert isinstance(futures[2].exception(PATIENCE), OutOfMemory)
    assert told == [False] * 3


def test_a_fault_fails_all_that_was_in_flight_or_queued_on_every_stream(gpu):
    sup = dp.Supervisor(gpu, streams=2, queue_size=10_000)
    futures = sup.submit_many([Work() for _ in range(4 * IN_FLIGHT)])
    looked_at(gpu)
    gpu.status = FAULT
    errors = [future.exception(PATIENCE) for future in futures]
    assert {type(error) for error in errors} == {DeviceFault}
    assert len({id(error) for error in errors}) == len(errors)
    with pytest.raises(DeviceFault, match="lost to this process"):
        sup.submit(Work())
    sup.close()
    assert sup.stats().done == 0
    assert sup.stats().restarts == 0


@pytest.mark.parametrize("call", ["record", "launch"])
def test_a_fault_that_another_call_shows_first_is_no_success_either(gpu, call):
    def launch():
        gpu.status = FAULT
        if call == "launch":
            gpu.fail(FAULT, "cuGraphLaunch")

    with dp.Supervisor(gpu, streams=1) as sup:
        hold = threading.Event()
        sup.submit(Work(lambda: hold.wait(PATIENCE)))
        futures = sup.submit_many([Work(), Work(launch), Work()])
        hold.set()
        assert {type(future.exception(PATIENCE)) for future in futures} == {DeviceFault}
        sup._pool.failures.take()  # the first one's, which nobody holds


@pytest.mark.parametrize("faulty", [True, False], ids=["a context that ends", "a context that is well"])
def test_what_a_library_says_of_a_context_that_has_ended_is_the_fault(gpu, faulty):
    def create():
        gpu.status = FAULT if faulty else 0
        raise CublasLtError("cublasLt", "cublasLtCreate", 1, "CUBLAS_STATUS_NOT_INITIALIZED")

    with dp.Supervisor(gpu, streams=1) as sup:
        error = sup.submit(Work(create)).exception(PATIENCE)
        assert isinstance(error, DeviceFault if faulty else CublasLtError)
        assert (gpu.fault is not None) == faulty
        if not faulty:
            after = sup.submit(Work(lambda: "well"))
            looked_at(gpu)
            gpu.tracks[0].done = 1
            assert after.result(PATIENCE) == "well"


def test_a_worker_that_breaks_settles_what_it_had_in_flight(gpu):
    def defect():
        raise ZeroDivisionError("a defect")

    with dp.Supervisor(gpu, streams=1) as sup:
        hold = threading.Event()
        held = sup.submit(Work(lambda: hold.wait(PATIENCE)))
        one, bad, two = sup.submit_many([Work(lambda: 1), Work(defect), Work(lambda: 2)])
        hold.set()
        assert isinstance(bad.exception(PATIENCE), WorkerFailed)
        assert held.result(PATIENCE)
        assert one.result(PATIENCE) == 1
        while len(gpu.tracks) < 2 or not gpu.tracks[1].enqueued:
            looked_at(gpu)
        gpu.tracks[1].done = 1
        assert two.result(PATIENCE) == 2
        assert sup.stats().restarts == 1
    assert [executor.closed for executor in gpu.executors] == [True, True]


@pytest.mark.parametrize("times", [1, 2])
def test_out_of_memory_settles_what_is_in_flight_and_tries_again_once(gpu, times):
    left = itertools.repeat(OutOfMemory("full"), times)

    def short():
        error = next(left, None)
        if error is not None:
            raise error
        return "fits"

    with dp.Supervisor(gpu, streams=1) as sup:
        hold = threading.Event()
        sup.submit(Work(lambda: hold.wait(PATIENCE)))
        one, big, two = sup.submit_many([Work(lambda: 1), Work(short), Work(lambda: 2)])
        hold.set()
        assert one.result(PATIENCE) == 1
        gpu.tracks[0].done = 10
        if times == 1:
            assert big.result(PATIENCE) == "fits"
        else:
            assert isinstance(big.exception(PATIENCE), OutOfMemory)
        assert two.result(PATIENCE) == 2
        assert gpu.executors[0].forgotten == 1
        assert (sup.stats().running, sup.stats().restarts) == (0, 0)


def test_a_worker_with_nothing_to_do_learns_and_takes_what_comes_meanwhile(gpu, monkeypatch):
    """Step by step: between two of them it looks whether something is queued."""
    steps, begun, go_on = [], threading.Event(), threading.Event()

    def learn(_):
        steps.append(len(steps))
        if len(steps) == 2:
            begun.set()
            assert go_on.wait(PATIENCE)
        return len(steps) < 5

    monkeypatch.setattr(Executor, "learn", learn)
    with dp.Supervisor(gpu, streams=1) as sup:
        assert begun.wait(PATIENCE)
        future = sup.submit(Work(lambda: len(steps)))
        go_on.set()
        looked_at(gpu)
        gpu.tracks[0].done = 1
        assert future.result(PATIENCE) == 2
