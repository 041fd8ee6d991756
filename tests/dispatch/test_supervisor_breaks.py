"""Workers of supervisors on the host that break, and each future's one end whatever happens."""

import asyncio
import contextlib
import importlib.util
import sys
import threading
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed, DeviceFault, Undelivered, WorkerFailed
from dispatch.supervise import failures
from dispatch.supervise.future import ALREADY_CLAIMED, ConditionalFuture, Future

spec = importlib.util.spec_from_file_location("busy_workers", Path(__file__).with_name("busy_workers.py"))
workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workers)
PATIENCE, Hold, defect, refuse = workers.PATIENCE, workers.Hold, workers.defect, workers.refuse


# -- workers that break ---------------------------------------------------------------------------------------------
def test_a_worker_that_breaks_is_replaced_and_the_queue_goes_on(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=1) as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        bad, *good = sup.submit_many([probe(defect), *(probe(lambda i=i: i) for i in range(20))])
        hold.release.set()
        with pytest.raises(WorkerFailed, match=r"failed on probe\(\): ZeroDivisionError") as caught:
            bad.result(PATIENCE)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert [future.result(PATIENCE) for future in good] == list(range(20))
        assert sup.stats().restarts == 1


class Mute(Exception):
    """Has no words: what is told of it must not be lost by that."""

    def __repr__(self):
        raise RuntimeError("it has no words")

    __str__ = __repr__


def mute() -> None:
    raise Mute


def test_what_an_error_does_as_it_is_put_into_words_loses_no_future_and_no_failure(probe):
    sup = dp.Supervisor("host", streams=1)
    failed = sup.submit(probe(mute))
    error = failed.exception(PATIENCE)
    assert (type(error), type(error.__cause__)) == (WorkerFailed, Mute)
    assert "a Mute that cannot be printed" in str(error)
    good = sup.submit(probe(lambda: 3))
    good.add_done_callback(lambda _: mute())
    assert good.result(PATIENCE) == 3
    with pytest.raises(Undelivered, match="a Mute that cannot be printed") as told:
        sup.close()
    assert [type(error) for error in told.value.exceptions] == [Mute]


@pytest.mark.parametrize("error", [ZeroDivisionError("a defect"), MemoryError("none left"), BadRequest("a", "b", "c")])
def test_one_that_cannot_be_ordered_behind_another_ends_and_does_not_run(probe, monkeypatch, error):
    def fail(_):
        raise error

    with dp.Supervisor("host", streams=2) as sup:
        queues = sup._pool.queues
        other = Future(probe())
        other._queue = queues[1]
        late = ConditionalFuture(probe(lambda: pytest.fail("it ran")), (other,))
        worker = queues[0].worker
        monkeypatch.setattr(worker, "_order_after", fail)
        with contextlib.suppress(ZeroDivisionError, MemoryError):
            assert worker._claim_conditional(late) is ALREADY_CLAIMED
        assert isinstance(late.exception(0), BadRequest if isinstance(error, BadRequest) else WorkerFailed)


def test_the_circuit_opens_when_workers_break_too_often(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=2, max_restarts=2, max_seconds=1000) as sup:
        sup.submit(probe(hold), worker=1)
        assert hold.entered.wait(PATIENCE)
        behind = sup.submit(probe(), worker=1)
        broken = [sup.submit(probe(defect), worker=0) for _ in range(4)]
        for future in broken[:3]:
            with pytest.raises(WorkerFailed, match="failed on"):
                future.result(PATIENCE)
        with pytest.raises(WorkerFailed, match=r"failed 3 times in 1000 s \(max_restarts=2\)") as caught:
            broken[3].result(PATIENCE)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(WorkerFailed, match="create a new supervisor"):
            sup.submit(probe())
        assert "broken" in repr(sup)
        hold.release.set()
        with pytest.raises(WorkerFailed, match="failed 3 times"):
            behind.result(PATIENCE)
    assert sup.stats().restarts == 2


def test_breaks_that_lie_long_back_do_not_count(probe):
    with dp.Supervisor("host", streams=1, max_restarts=1, max_seconds=0) as sup:
        for _ in range(5):
            with pytest.raises(WorkerFailed, match="failed on"):
                sup.submit(probe(defect)).result(PATIENCE)
        assert sup.submit(probe(lambda: 8)).result(PATIENCE) == 8


def test_even_an_exit_from_a_worker_is_a_value(probe):
    with dp.Supervisor("host", streams=1) as sup:
        with pytest.raises(WorkerFailed, match="SystemExit"):
            sup.submit(probe(lambda: sys.exit(3))).result(PATIENCE)
        assert sup.submit(probe(lambda: 9)).result(PATIENCE) == 9


def test_a_lost_device_ends_every_future_and_says_so_from_then_on(probe):
    device = dp.device("host")
    hold = Hold()

    def lose() -> None:
        hold()
        device.fault = DeviceFault("host is lost to this process")
        raise device.fault

    try:
        with dp.Supervisor(device, streams=2) as sup:
            guilty = sup.submit(probe(lose), worker=0)
            assert hold.entered.wait(PATIENCE)
            pending = sup.submit_many([probe() for _ in range(10)], worker=0)
            hold.release.set()
            errors = [future.exception(PATIENCE) for future in (guilty, *pending)]
            assert {type(error) for error in errors} == {DeviceFault}
            assert len({id(error) for error in errors}) == len(errors)
            with pytest.raises(DeviceFault, match="lost to this process"):
                sup.submit(probe())
    finally:
        device.fault = None


# -- many at once -------------------------------------------------------------------------------------------------
def test_each_future_ends_exactly_once_under_stress(probe):
    ends: dict[int, int] = {}
    ran: dict[int, int] = {}
    lock = threading.Lock()
    kinds = [lambda: None, refuse, lambda: None]

    def action(number: int) -> None:
        with lock:
            ran[number] = ran.get(number, 0) + 1
        kinds[number % 3]()

    def ended(_: dp.Future, number: int) -> None:
        with lock:
            ends[number] = ends.get(number, 0) + 1

    def one(number: int) -> dp.Future:
        future = sup.submit(probe(lambda: action(number)), timeout=PATIENCE if number % 7 == 0 else None)
        future.add_done_callback(lambda future: ended(future, number))
        if number % 5 == 0:
            future.cancel()
        return future

    def from_thread(start: int) -> None:
        barrier.wait(PATIENCE)
        futures = [one(start + i) for i in range(200)]
        many = sup.submit_many([probe(lambda n=start + i: action(n)) for i in range(200, 400)])
        for i, future in enumerate(many, start + 200):
            future.add_done_callback(lambda future, i=i: ended(future, i))
        mine.extend(zip(range(start, start + 400), futures + many, strict=True))

    async def from_loop(start: int) -> None:
        for begin in range(start, start + 400, 50):
            futures = [one(number) for number in range(begin, begin + 50)]
            await asyncio.gather(*futures, return_exceptions=True)
            mine.extend(zip(range(begin, begin + 50), futures, strict=True))

    mine: list[tuple[int, dp.Future]] = []
    barrier = threading.Barrier(9)
    with dp.Supervisor("host", streams=4, queue_size=64) as sup:
        threads = [threading.Thread(target=from_thread, args=(1000 * i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        barrier.wait(PATIENCE)
        asyncio.run(from_loop(8000))
        for thread in threads:
            thread.join(PATIENCE)
        assert len(mine) == 3600
        for number, future in mine:
            if not future.cancelled():
                error = future.exception(PATIENCE)
                assert isinstance(error, BadRequest) == (number % 3 == 1)
    assert ends == {number: 1 for number, _ in mine}
    assert ran == {number: 1 for number, future in mine if not future.cancelled()}
    stats = sup.stats()
    assert stats.done + stats.failed + stats.cancelled == 3600
    assert stats.queued == stats.running == stats.restarts == 0


def test_submitting_while_it_is_closed_leaves_no_future_behind(probe):
    for _ in range(20):
        sup = dp.Supervisor("host", streams=2)
        futures: list[dp.Future] = []
        barrier = threading.Barrier(3)

        def submit(sup=sup, barrier=barrier, futures=futures) -> None:
            barrier.wait(PATIENCE)
            try:
                while True:
                    futures.append(sup.submit(probe()))
            except Closed:
                pass

        threads = [threading.Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        barrier.wait(PATIENCE)
        sup._pool.finish()
        for thread in threads:
            thread.join(PATIENCE)
        assert all(isinstance(future.exception(PATIENCE), (Closed, type(None))) for future in futures)


def test_failures_that_were_asked_for_are_not_kept(probe, monkeypatch):
    monkeypatch.setattr(failures, "PRUNE", 16)
    with dp.Supervisor("host", streams=1) as sup:
        sup._pool.failures._prune_at = 16
        for _ in range(100):
            assert sup.submit(probe(refuse)).exception(PATIENCE)
        assert len(sup._pool.failures) < 20
