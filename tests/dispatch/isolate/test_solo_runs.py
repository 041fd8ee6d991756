"""A request that runs alone, against a child that the test plays: when its future goes on, and when it fails."""

import socket
from types import SimpleNamespace

import pytest

from cudabind.errors import CudaDriverError
from dispatch.errors import DeviceFault
from dispatch.supervise.future import ConditionalFuture, Future
from dispatch.supervise.process import messages, recovery
from dispatch.supervise.process.repeatable import InFlightRequest

NUMBER = 7


class WorkerQueue:
    """A worker's place whose child does what `plays` says at each sending."""

    def __init__(self, far, control, plays):
        self.index, self.sent, self.reports = 0, {NUMBER: None}, []
        self.far, self.control, self.plays = far, control, list(plays)

    def resend(self, _link, _requests):
        play = self.plays.pop(0)
        if play == "ends":
            self.far.send([NUMBER])
        elif play == "faults":
            self.control.send(b"lost")
        else:
            self.control.close()
            self.far.socket.close()

    def settle_report(self, message):
        self.reports.append(message)
        del self.sent[message[0]]


@pytest.fixture
def alone():
    """`alone(plays, runs)`: what becomes of the request, and its queue."""
    pairs = [socket.socketpair() for _ in range(2)]
    (near, far), (control, other) = pairs

    def run(plays, runs):
        child = SimpleNamespace(
            links=[messages.Connection(near)], control=control, exit_state=lambda: "", blocked_errno=0
        )
        pool = SimpleNamespace(
            retry_chunks=lambda: None,
            hang_seconds=60,
            current_child=lambda: child,
            handle_control=lambda _: "the device is lost",
            last_message=lambda _: "it died",
        )
        queue = WorkerQueue(messages.Connection(far), other, plays)
        sent = InFlightRequest(NUMBER, SimpleNamespace(), None, {}, queue)
        return recovery._run_alone(pool, sent, False, runs), queue

    yield run
    for pair in pairs:
        for end in pair:
            end.close()


@pytest.mark.parametrize("runs", [1, 2])
def test_one_that_ends_well_each_time_is_reported_once(alone, runs):
    loss, queue = alone(["ends"] * runs, runs)
    assert (loss, queue.reports, queue.plays) == (None, [[NUMBER]], [])


@pytest.mark.parametrize(("play", "why"), [("faults", "the device is lost"), ("dies", "it died")])
def test_one_that_ended_before_its_fault_showed_is_not_acquitted(alone, play, why):
    loss, queue = alone(["ends", play], 2)
    assert (loss, queue.reports, list(queue.sent)) == (why, [], [NUMBER])


def test_one_that_waits_for_another_is_not_run_alone():
    future = ConditionalFuture(None, (Future(None),))
    queue = SimpleNamespace(refusal=lambda _: None)
    pool = SimpleNamespace(current_child=lambda: pytest.fail("it would wait for ever"))
    assert recovery._test_suspect(pool, InFlightRequest(NUMBER, future, None, {}, queue), may_hang=True, runs=1) is None


@pytest.mark.parametrize(("status", "is_late"), [(716, True), (700, False), (719, False), (1, False), (None, False)])
def test_only_a_misaligned_store_may_end_before_its_fault(status, is_late):
    error = DeviceFault("lost")
    error.__cause__ = CudaDriverError("cuda", "cuEventQuery", status)
    assert recovery.ChildLoss("lost", error).may_be_late == is_late
    assert recovery.ChildLoss("lost", error).is_kernel_fault == (status in (700, 716, 719))
    assert not recovery.ChildLoss("the child died").may_be_late
