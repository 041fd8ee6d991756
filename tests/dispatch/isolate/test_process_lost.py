"""A child process that is lost or misses a deadline: what becomes of its requests, and who is taken to be guilty."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import (
    DeadlineExceeded,
    DeviceFault,
    OutOfMemory,
    TaintedTensor,
    WorkerFailed,
)
from dispatch.supervise.process import sending

spec = importlib.util.spec_from_file_location("process_supervisors", Path(__file__).with_name("process_supervisors.py"))
supervisors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervisors)
PATIENCE, N, open_supervisor, hold = supervisors.PATIENCE, supervisors.N, supervisors.open_supervisor, supervisors.hold
child_of, pair, vector, close = supervisors.child_of, supervisors.pair, supervisors.vector, supervisors.close
trouble_of = supervisors.trouble_of

NARROW = """
import select
from pathlib import Path
from dispatch.supervise.process.child_workers import HostChild
opened = HostChild._open

def open_late(self):
    told = Path(__file__).with_name("told")
    if self.queue.index == 1 and not told.exists():
        select.select([self.queue.link.socket], [], [])  # until there is a job
        told.touch()
        raise RuntimeError("no room for a stream")
    opened(self)

HostChild._open = open_late
"""
DEFECT = """
from dispatch.core.host_plan import NumpyPlan
check = NumpyPlan._check_names

def fail(plan, request, results, outputs):
    if request.op == "softmax":
        raise RuntimeError("a defect")
    check(plan, request, results, outputs)

fail.__globals__["__name__"] = "dispatch.with_a_defect"
NumpyPlan._check_names = fail
"""


# -- the child is lost ----------------------------------------------------------------------------------------------
def test_a_worker_that_cannot_be_opened_costs_the_child_and_no_request(rng, tmp_path, monkeypatch):
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.syspath_prepend(tmp_path)
    with dp.Supervisor("host", isolation="process", streams=2, setup=("narrow",)) as sup:
        request, right = pair(sup.device, rng)
        assert np.allclose(sup.submit(request, worker=1).result(PATIENCE).numpy(), right, atol=1e-5)
        assert sup.stats().restarts == 1
    sup.device.close()


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV], ids=lambda s: s.name)
def test_what_was_in_flight_and_queued_ends_well_when_the_child_is_lost(open_supervisor, rng, hold, sent, spare):
    with open_supervisor(spare=spare) as sup:
        work = [pair(sup.device, rng) for _ in range(300)]
        held = trouble_of(sup, "held", once=hold.once)
        futures = sup.submit_many([held, *(request for request, _ in work)])
        hold.release_behind(child_of(sup), sent, PATIENCE)
        for future, (_, right) in zip(futures[1:], work, strict=True):
            assert close(future.result(PATIENCE), right)
        assert futures[0].result(PATIENCE) is held.out
        assert sup.generation == 2
        assert (sup.stats().restarts, sup.stats().failed) == (1, 0)


def test_what_waits_for_others_is_sent_to_a_child_that_has_died_unnoticed_and_ends_well(open_supervisor, rng, hold):
    entered, release = threading.Event(), threading.Event()
    with open_supervisor() as sup, hold:
        held = sup.submit(trouble_of(sup, "held", once=hold.once))
        held.add_done_callback(lambda _: (entered.set(), release.wait(PATIENCE)))
        hold.release()
        assert entered.wait(PATIENCE)  # the monitor thread, which would notice
        hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
        work = [pair(sup.device, rng) for _ in range(12)]
        futures = [sup.submit(request, worker=0) for request, _ in work[:3]]
        try:
            for number, (request, _) in enumerate(work[3:]):
                futures.append(sup.submit(request, worker=number % 2, after=futures[2]))
        finally:
            release.set()
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)
        assert sup.stats().restarts == 1


def test_only_the_guilty_request_fails_and_names_itself(open_supervisor, rng):
    with open_supervisor(max_restarts=10, max_seconds=600) as sup:
        work = [pair(sup.device, rng) for _ in range(100)]
        guilty = trouble_of(sup, "exit")
        requests = [request for request, _ in work]
        futures = sup.submit_many([*requests[:50], guilty, *requests[50:]])
        error = futures.pop(50).exception(PATIENCE)
        assert isinstance(error, DeviceFault)
        assert "trouble(exit)" in str(error)
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)


def test_a_request_that_dies_once_is_not_taken_to_be_guilty(open_supervisor, tmp_path):
    with open_supervisor(max_restarts=10, max_seconds=600) as sup:
        request = trouble_of(sup, "die once", once=str(tmp_path / "died"))
        assert close(sup.submit(request).result(PATIENCE), 3.0)
        assert sup.stats().restarts == 1


def test_what_may_be_half_written_cannot_be_read_until_it_is_overwritten(open_supervisor):
    with open_supervisor(streams=1, max_restarts=10, max_seconds=600) as sup:
        guilty = trouble_of(sup, "die")
        other = vector(sup.device, 5.0)
        with pytest.raises(DeviceFault):
            sup.submit(guilty).result(PATIENCE)
        half = guilty.out
        for read in (half.numpy, lambda: np.asarray(half), lambda: np.from_dlpack(half), half[:2].numpy):
            with pytest.raises(TaintedTensor, match="half written"):
                read()
        dependent = sys.modules["trouble"].Trouble("fine", half, vector(sup.device))
        with pytest.raises(TaintedTensor):
            sup.submit(dependent).result(PATIENCE)
        assert close(guilty.a, 3.0)
        assert close(other, 5.0)
        half[:2].copy_from(np.ones(2, np.float32))
        assert close(half[:2], 1.0)
        with pytest.raises(TaintedTensor):
            half[2:].numpy()
        sup.submit(sys.modules["trouble"].Trouble("fine", other, half)).result(PATIENCE)
        assert close(half, 5.0)
        assert sup.device.taints == 0


def test_a_request_that_reads_what_it_writes_is_not_run_again(open_supervisor, rng, hold):
    with open_supervisor(streams=1) as sup:
        dev = sup.device
        a, b, c = (dev.array(rng.standard_normal((N, N)), "f32") for _ in range(3))
        held = trouble_of(sup, "held", once=hold.once)
        futures = sup.submit_many([held, dp.MatmulRequest(a, b, c=c, out=c)])
        hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
        with pytest.raises(DeviceFault, match="reads an operand that it writes"):
            futures[1].result(PATIENCE)
        with pytest.raises(TaintedTensor):
            c.numpy()
        futures[0].result(PATIENCE)


def test_a_request_whose_operand_was_overwritten_behind_it_is_not_run_again(open_supervisor, hold):
    make = sys.modules["trouble"].Trouble
    with open_supervisor(streams=1) as sup:
        x, y, z = (vector(sup.device, value) for value in (1.0, 2.0, 4.0))
        held = trouble_of(sup, "held", once=hold.once)
        futures = sup.submit_many([held, make("fine", x, y), make("fine", z, x)])
        hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
        with pytest.raises(DeviceFault, match="overwrites its operand a"):
            futures[1].result(PATIENCE)
        assert close(futures[2].result(PATIENCE), 4.0)
        with pytest.raises(TaintedTensor):
            y.numpy()


def test_a_defect_costs_its_request_and_no_process(open_supervisor, rng, tmp_path, monkeypatch):
    (tmp_path / "with_a_defect.py").write_text(DEFECT)
    monkeypatch.syspath_prepend(tmp_path)
    with open_supervisor(streams=1, setup=("with_a_defect",)) as sup:
        request, right = pair(sup.device, rng)
        pid = child_of(sup)
        broken, good = sup.submit_many([dp.SoftmaxRequest(sup.device.zeros((3, 4))), request])
        with pytest.raises(WorkerFailed, match=r"softmax.*a defect"):
            broken.result(PATIENCE)
        assert close(good.result(PATIENCE), right)
        assert (child_of(sup), sup.generation) == (pid, 1)


def test_a_lack_of_memory_costs_its_request_alone(open_supervisor, rng):
    with open_supervisor(streams=1) as sup:
        request, right = pair(sup.device, rng)
        short, good = sup.submit_many([trouble_of(sup, "out of memory"), request])
        with pytest.raises(OutOfMemory):
            short.result(PATIENCE)
        assert close(good.result(PATIENCE), right)
        assert sup.stats().restarts == 0


def test_the_circuit_opens_when_children_are_lost_too_often(open_supervisor, rng):
    sup = open_supervisor(streams=1, max_restarts=1, max_seconds=600)
    request, _ = pair(sup.device, rng)
    futures = sup.submit_many([trouble_of(sup, "die"), request, trouble_of(sup, "die"), request, request])
    errors = [future.exception(PATIENCE) for future in futures]
    assert [type(error) for error in errors] == [DeviceFault, type(None), *[WorkerFailed] * 3]
    assert "max_restarts=1" in str(errors[2])
    with pytest.raises(WorkerFailed, match="2 times"):
        sup.submit(request)
    stats = sup.stats()
    assert (stats.running, stats.queued, stats.done, stats.failed) == (0, 0, 1, 4)
    sup.close()


# -- deadlines ------------------------------------------------------------------------------------------------------
def test_a_request_without_an_end_is_ended_at_its_deadline(open_supervisor, rng):
    with open_supervisor(streams=2) as sup:
        work = [pair(sup.device, rng) for _ in range(20)]
        hung = sup.submit(trouble_of(sup, "hang"), timeout=0.3, worker=0)
        futures = [sup.submit(request, worker=index % 2) for index, (request, _) in enumerate(work)]
        with pytest.raises(DeadlineExceeded):
            hung.result(PATIENCE)
        for future, (_, right) in zip(futures, work, strict=True):
            assert close(future.result(PATIENCE), right)


def test_a_request_that_hangs_before_one_with_a_deadline_is_ended_too(open_supervisor, rng):
    with open_supervisor(streams=1) as sup:
        request, right = pair(sup.device, rng)
        hung = sup.submit(trouble_of(sup, "hang"))
        late = sup.submit(request, timeout=PATIENCE)
        while not late.is_launched:
            threading.Event().wait(0.001)
        late.deadline = 0.0  # it is over only now that the child has it, however long that took
        sup._pool.watch_deadline(late, sup._pool.queues[0])
        with pytest.raises(DeadlineExceeded):
            late.result(PATIENCE)
        again = sup.submit(request, timeout=PATIENCE)
        with pytest.raises(DeadlineExceeded, match="it has no deadline, but a request that was submitted"):
            hung.result(PATIENCE)
        assert close(again.result(PATIENCE), right)


def test_a_request_is_taken_back_before_it_starts(open_supervisor, rng, hold, monkeypatch):
    monkeypatch.setattr(sending, "WINDOW", 1)
    with open_supervisor(streams=1) as sup, hold:
        request, _ = pair(sup.device, rng)
        first, last = sup.submit(trouble_of(sup, "held", once=hold.once)), sup.submit(request)
        assert last.cancel()
        hold.release()
        first.result(PATIENCE)
        assert np.isnan(request.out.numpy()).all()
