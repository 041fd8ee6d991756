"""What comes after a worker that broke: a restart, an open circuit, one that half-opens; and what cannot start."""

from __future__ import annotations

import threading

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed, WorkerFailed

PATIENCE = 120  # seconds, on a machine that has other things to do


def defect() -> None:
    raise ZeroDivisionError("a defect")


def break_all(sup, probe) -> None:
    """Have a worker break until the circuit is open."""
    error: BaseException | None = None
    while "max_restarts=1" not in str(error):
        try:
            error = sup.submit(probe(defect)).exception(PATIENCE)
        except WorkerFailed as refusal:  # noqa: PERF203
            error = refusal


def wait_until_half_open(sup, probe):
    pause = threading.Event()
    while True:
        try:
            return sup.submit(probe(lambda: 7))
        except WorkerFailed as error:  # noqa: PERF203
            if "the next attempt is" not in str(error):
                raise
            pause.wait(0.01)


@pytest.mark.parametrize("given", [float("nan"), -1, "1", True])
def test_a_cooldown_is_a_time(given):
    with pytest.raises(BadRequest, match=r"^cooldown: got"):
        dp.Supervisor("host", cooldown=given)


def test_a_circuit_without_a_cooldown_stays_open(probe):
    with dp.Supervisor("host", streams=1, max_restarts=1, max_seconds=1000) as sup:
        break_all(sup, probe)
        with pytest.raises(WorkerFailed, match="create a new supervisor"):
            sup.submit(probe())
        assert sup._pool.state


def test_an_open_circuit_half_opens_after_its_cooldown_and_has_one_break_left(probe):
    with dp.Supervisor("host", streams=2, max_restarts=1, max_seconds=1000, cooldown=0.2) as sup:
        x = sup.device.array([1.0, 2.0])
        for _ in range(2):
            break_all(sup, probe)
            assert wait_until_half_open(sup, probe).result(PATIENCE) == 7
            assert "broken" not in repr(sup)
            futures = sup.submit_many([probe(lambda n=n: n) for n in range(9)])
            assert [future.result(PATIENCE) for future in futures] == [*range(9)]
            assert x.numpy().tolist() == [1, 2]
            assert isinstance(sup.submit(probe(defect)).exception(PATIENCE), WorkerFailed)  # the one: open again
            wait_until_half_open(sup, probe).exception(PATIENCE)


def test_what_is_queued_when_the_circuit_opens_fails_and_what_waits_for_others_is_held_up_again_after_it(probe):
    entered, release = threading.Event(), threading.Event()
    with dp.Supervisor("host", streams=2, max_restarts=0, cooldown=0.05) as sup:
        running = sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))), worker=1)
        assert entered.wait(PATIENCE)
        behind = sup.submit(probe(), worker=1, priority=1)
        sup.submit(probe(defect), worker=0).exception(PATIENCE)
        assert isinstance(behind.exception(PATIENCE), WorkerFailed)
        wait_until_half_open(sup, probe)
        order: list[int] = []
        last = sup.submit(probe(lambda: order.append(2)), worker=0, after=running)
        for _ in range(5):  # these go first, and worker 0 looks at `last` after each
            assert sup.submit(probe(lambda: 1), worker=0, priority=-1).result(PATIENCE) == 1
        assert not last.done()
        release.set()
        last.result(PATIENCE)
        assert running.exception(PATIENCE) is None
        assert order == [2]


def test_a_supervisor_is_closed_while_its_circuit_rests(probe):
    sup = dp.Supervisor("host", streams=1, max_restarts=1, max_seconds=1000, cooldown=1e6)
    thread = sup._pool.queues[0].worker.thread
    break_all(sup, probe)
    assert "broken" in repr(sup)
    with pytest.raises(WorkerFailed, match=r"cooldown=1e\+06"):
        sup.submit(probe())
    sup.close()
    thread.join(PATIENCE)
    assert not [each for each in threading.enumerate() if "worker" in each.name]
    with pytest.raises(Closed):
        sup.submit(probe())


# -- threads that cannot start ----------------------------------------------------------------------------------------
@pytest.fixture
def unstarted(monkeypatch):
    """`unstarted(n)`: the n-th thread from now on cannot start; says how many were tried."""
    start, tried = threading.Thread.start, []

    def fail(number):
        tried.clear()

        def one(self):
            tried.append(self.name)
            if len(tried) == number:
                raise RuntimeError("can't start new thread")
            start(self)

        monkeypatch.setattr(threading.Thread, "start", one)
        return tried

    yield fail
    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_is_made_whole_or_not_at_all(isolation, unstarted, tmp_path):
    before = set(threading.enumerate())
    for number in range(1, 20):
        tried = unstarted(number)
        try:
            sup = dp.Supervisor("host", streams=3, isolation=isolation, journal=tmp_path / "journal")
        except WorkerFailed as error:
            if "can't start new thread" not in str(error):
                raise
            for thread in set(threading.enumerate()) - before:
                thread.join(PATIENCE)
                assert not thread.is_alive()
        else:
            made = len(tried)
            sup.close()
            if made < number:  # nothing failed
                break
    assert number > 2
    dp.device("host").close()


def test_a_worker_is_replaced_where_the_system_gives_no_more_threads(probe, unstarted):
    with dp.Supervisor("host", streams=1, max_restarts=100) as sup:
        for _ in range(3):
            unstarted(1)
            assert isinstance(sup.submit(probe(defect)).exception(PATIENCE), WorkerFailed)
            assert sup.submit(probe(lambda: 5)).result(PATIENCE) == 5
        assert sup.stats().restarts == 3


def test_no_thread_at_all_is_an_error_with_a_name(monkeypatch):
    from dispatch.supervise import pool

    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "start_new_thread", none)
    with pytest.raises(WorkerFailed, match="limits of threads"):
        dp.Supervisor("host")
    monkeypatch.undo()
    dp.device("host").close()
