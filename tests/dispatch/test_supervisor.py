"""Supervisors on the host: placing, full queues, restarts, what is raised at the end, and each future's one end."""

import asyncio
import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Closed, DeviceFault, QueueFull, StaleTensor, Undelivered, WorkerFailed
from dispatch.supervise import failures
from dispatch.supervise import pool as pool_module
from dispatch.supervise.future import MISSED, Future, LateFuture
from dispatch.supervise.placement import FEW, NEAR

PATIENCE = 120  # seconds, on a machine that has other things to do


class Hold:
    """Keeps a worker busy from `entered` until `release`."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


def defect() -> None:
    raise ZeroDivisionError("a defect")


def refuse() -> None:
    raise BadRequest("a", "this", "that")


def run_script(script: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True, timeout=600, env=os.environ
    )


# -- results ------------------------------------------------------------------------------------------------------
def test_products_come_out_as_numpy_has_them(rng):
    host = dp.device("host")
    pairs = [(rng.random((m, 7)), rng.random((7, m + 1))) for m in range(1, 40)]
    requests = [dp.MatmulRequest(host.array(a), host.array(b)) for a, b in pairs]
    with dp.Supervisor("host", streams=3) as sup:
        assert sup.device is host
        futures = sup.submit_many(requests) + [sup.submit(request) for request in requests]
        for future, (a, b) in zip(futures, pairs * 2, strict=True):
            np.testing.assert_allclose(future.result(PATIENCE).numpy(), a @ b, rtol=1e-12)
    stats = sup.stats()
    assert (stats.done, stats.failed, stats.queued, stats.running) == (78, 0, 0, 0)
    assert 0 < stats.p50 <= stats.p90 <= stats.p99


def test_asyncio_awaits_results(probe):
    async def main(sup: dp.Supervisor) -> list[int]:
        return await asyncio.gather(*(sup.submit(probe(lambda i=i: i)) for i in range(500)))

    with dp.Supervisor("host") as sup:
        assert asyncio.run(main(sup)) == list(range(500))


@pytest.mark.parametrize("options", [{"isolation": "fiber"}, {"when_full": "drop"}, {"placement": "random"}])
def test_an_option_that_is_none_names_what_is_accepted(options):
    (name,) = options
    with pytest.raises(BadRequest, match=rf"{name}: got .* expected '"):
        dp.Supervisor("host", **options)


@pytest.mark.parametrize(
    "options", [{"streams": 0}, {"queue_size": 0}, {"max_restarts": -1}, {"streams": "four"}, {"max_seconds": -1}]
)
def test_a_number_that_is_too_small_is_refused(options):
    with pytest.raises(BadRequest, match="or more"):
        dp.Supervisor("host", **options)


def test_the_worker_asked_for_must_exist(probe):
    with dp.Supervisor("host", streams=2) as sup:
        for worker in (2, -1, "0"):
            with pytest.raises(BadRequest, match="from 0 to 1"):
                sup.submit(probe(), worker=worker)
            with pytest.raises(BadRequest, match="from 0 to 1"):
                sup.submit_many([probe()], worker=worker)


# -- placing ------------------------------------------------------------------------------------------------------
def test_requests_that_are_waited_for_one_by_one_stay_with_one_worker_until_it_is_busy(probe):
    def ran() -> str:
        return sup.submit(probe(lambda: threading.current_thread().name)).result(PATIENCE)[-1]

    with dp.Supervisor("host", streams=3) as sup:
        assert {ran() for _ in range(6)} == {"0"}
        hold = Hold()
        busy = sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        assert "0" not in (others := {ran() for _ in range(6)})
        assert len(others) == 1
        hold.release.set()
        busy.result(PATIENCE)
        assert {ran() for _ in range(6)} == others


def test_idle_workers_get_requests_in_turn_where_that_is_asked_for(probe):
    with dp.Supervisor("host", streams=3, placement="fair") as sup:
        names = [sup.submit(probe(lambda: threading.current_thread().name)).result(PATIENCE)[-1] for _ in range(6)]
    assert sorted(names[:3]) == sorted(names[3:]) == ["0", "1", "2"]


def test_a_busy_worker_gets_no_more_while_others_have_less(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=2) as sup:
        sup.submit(probe(hold), worker=0)
        assert hold.entered.wait(PATIENCE)
        ran = [sup.submit(probe(lambda: threading.current_thread().name)).result(PATIENCE)[-1] for _ in range(4)]
        hold.release.set()
    assert ran == ["1"] * 4


def test_a_batch_is_split_so_that_all_have_as_much_to_do(probe):
    holds = [Hold(), Hold(), Hold()]
    with dp.Supervisor("host", streams=3) as sup:
        for index, hold in enumerate(holds):
            sup.submit(probe(hold), worker=index)
            assert hold.entered.wait(PATIENCE)
        sup.submit_many([probe() for _ in range(5)], worker=1)
        sup.submit_many([probe() for _ in range(10)])
        assert [len(queue.pending) for queue in sup._pool.queues] == [5, 5, 5]
        sup.submit_many([probe() for _ in range(2)])
        assert sorted(len(queue.pending) for queue in sup._pool.queues) in ([5, 6, 6], [5, 5, 7])
        for hold in holds:
            hold.release.set()


def test_a_request_that_is_bound_to_a_worker_goes_there_again(probe):
    with dp.Supervisor("host", streams=4) as sup:
        request = probe(lambda: threading.current_thread().name)
        assert sup.submit(request, worker=2).result(PATIENCE).endswith("2")
        (executor,) = [executor for executor, queue in sup._pool.queue_of.items() if queue.index == 2]
        request.bound = type("Bound", (), {"executor": executor})  # as a GPU's executor leaves it
        assert {sup.submit(request).result(PATIENCE)[-1] for _ in range(8)} == {"2"}
    with dp.Supervisor("host", streams=4, placement="fair") as sup:
        assert {sup.submit(request).result(PATIENCE)[-1] for _ in range(8)} == {"0", "1", "2", "3"}


def test_a_worker_that_knows_many_requests_gets_no_more_than_a_few_of_them_while_others_are_idle(probe):
    with dp.Supervisor("host", streams=2) as sup:
        (executor,) = [executor for executor, queue in sup._pool.queue_of.items() if queue.index == 0]
        known = probe(lambda: threading.current_thread().name)
        known.bound = type("Bound", (), {"executor": executor})
        holds = [Hold(), Hold()]
        first = sup.submit(probe(holds[0]), worker=0)
        assert holds[0].entered.wait(PATIENCE)
        sent = [sup.submit(known) for _ in range(FEW)]
        assert [len(queue.pending) for queue in sup._pool.queues] == [FEW, 0]
        assert sup.submit(known).result(PATIENCE)[-1] == "1"
        second = sup.submit(probe(holds[1]), worker=1)
        assert holds[1].entered.wait(PATIENCE)
        sent += [sup.submit(known) for _ in range(NEAR - FEW + 1)]  # nobody is idle
        assert [len(queue.pending) for queue in sup._pool.queues] == [NEAR + 1, 0]
        sent.append(sup.submit(known))
        assert [len(queue.pending) for queue in sup._pool.queues] == [NEAR + 1, 1]
        for hold in holds:
            hold.release.set()
        assert [future.result(PATIENCE)[-1] for future in sent] == ["0"] * (NEAR + 1) + ["1"]
        assert first.result(PATIENCE) is second.result(PATIENCE) is None


# -- full queues --------------------------------------------------------------------------------------------------
def test_a_full_queue_raises_if_asked_to(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=1, queue_size=2, when_full="raise") as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        with pytest.raises(QueueFull, match="no room for 3 more"):
            sup.submit_many([probe(), probe(), probe()])
        sup.submit_many([probe(), probe()])
        with pytest.raises(QueueFull, match=r"queue of worker 0 of host is full \(2 requests each\)"):
            sup.submit(probe())
        hold.release.set()
    assert sup.stats().done == 3


def test_a_full_queue_blocks_until_there_is_room(probe):
    hold, ran = Hold(), []
    with dp.Supervisor("host", streams=1, queue_size=2) as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        queued = [sup.submit(probe()), sup.submit(probe())]
        with pytest.raises(QueueFull, match="time to wait is over"):
            sup.submit(probe(), timeout=0.01)
        threads = [
            threading.Thread(target=lambda: sup.submit(probe(lambda: ran.append("one")))),
            threading.Thread(target=lambda: sup.submit_many([probe(lambda: ran.append("many"))] * 7)),
        ]
        for thread in threads:
            thread.start()
        assert not ran
        hold.release.set()
        for thread in threads:
            thread.join(PATIENCE)
    assert sorted(ran) == ["many"] * 7 + ["one"]
    assert all(future.done() for future in queued)


def test_a_worker_does_not_wait_for_itself_to_make_room(probe):
    caught, called = [], threading.Event()

    def call_back(_: dp.Future) -> None:
        sup.submit_many([probe(), probe()])
        with pytest.raises(QueueFull, match="own thread cannot wait") as info:
            sup.submit(probe())
        caught.append(info.value)
        called.set()

    with dp.Supervisor("host", streams=1, queue_size=2) as sup:
        hold = Hold()
        future = sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        future.add_done_callback(call_back)
        hold.release.set()
        assert called.wait(PATIENCE)
    assert len(caught) == 1


def test_who_waits_for_room_hears_that_there_will_be_none(probe):
    hold, heard = Hold(), []
    sup = dp.Supervisor("host", streams=1, queue_size=1)
    sup.submit(probe(hold))
    assert hold.entered.wait(PATIENCE)
    queued = sup.submit(probe())

    def submit() -> None:
        with pytest.raises(Closed):
            sup.submit(probe())
        heard.append(1)

    def submit_many() -> None:
        heard.extend(type(future.exception(PATIENCE)) for future in sup.submit_many([probe(), probe()]))

    threads = [threading.Thread(target=submit), threading.Thread(target=submit_many)]
    for thread in threads:
        thread.start()
    while sup._pool.blocked < 2:
        threading.Event().wait(0.001)
    sup.close(wait=False)
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(heard, key=str) == [1, Closed, Closed]
    hold.release.set()
    sup.close()
    assert queued.cancelled()


# -- the end ------------------------------------------------------------------------------------------------------
def test_leaving_the_block_waits_for_all_work(probe):
    ran = []
    with dp.Supervisor("host", streams=2) as sup:
        futures = sup.submit_many([probe(lambda i=i: ran.append(i)) for i in range(300)])
    assert sorted(ran) == list(range(300))
    assert all(future.done() for future in futures)
    with pytest.raises(Closed, match="its block was left"):
        sup.submit(probe())
    with pytest.raises(Closed, match="make a new one"):
        sup.submit_many([probe()])
    sup.close()
    assert "closed" in repr(sup)


def test_failures_that_nobody_asked_for_are_raised_at_the_end(probe):
    def call_back(_: dp.Future) -> None:
        raise OSError("in a callback")

    sup = dp.Supervisor("host", streams=1)
    asked = sup.submit(probe(refuse))
    assert asked.exception(PATIENCE)
    futures = [sup.submit(probe(refuse)), sup.submit(probe(defect))]
    hold = Hold()
    sup.submit(probe(hold)).add_done_callback(call_back)
    hold.release.set()
    with pytest.raises(Undelivered, match="3 failure") as caught:
        sup.close()
    kinds = sorted(type(error).__name__ for error in caught.value.exceptions)
    assert kinds == ["BadRequest", "OSError", "WorkerFailed"]
    assert caught.value.__cause__ is caught.value.exceptions[0]
    assert futures[0].exception() in caught.value.exceptions
    sup.close()  # nothing is raised twice


def test_an_exception_that_leaves_the_block_carries_them(probe):
    def leave(error: Exception | None) -> None:
        with dp.Supervisor("host", streams=1) as sup:
            sup.submit(probe(refuse))
            if error is not None:
                raise error

    with pytest.raises(Undelivered):
        leave(None)
    with pytest.raises(KeyError) as caught:
        leave(KeyError("the user's"))
    assert isinstance(caught.value.__context__, Undelivered)
    if sys.version_info >= (3, 11):
        assert "BadRequest: a: got this" in caught.value.__notes__[0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_that_is_closed_has_left_no_thread_behind(isolation, monkeypatch):
    begin, before = pool_module.WorkerPool._begin, set(threading.enumerate())

    def slow(self, then):
        begin(self, then)
        time.sleep(0.3)  # whom it has let go on is faster

    monkeypatch.setattr(pool_module.WorkerPool, "_begin", slow)
    with dp.Supervisor("host", streams=1, isolation=isolation) as sup:
        pass
    assert not [thread.name for thread in set(threading.enumerate()) - before]
    if isolation == "process":
        sup.device.close()


def test_close_without_waiting_cancels_what_has_not_started(probe):
    hold = Hold()
    sup = dp.Supervisor("host", streams=1)
    running = sup.submit(probe(hold))
    assert hold.entered.wait(PATIENCE)
    queued = sup.submit_many([probe() for _ in range(5)])
    sup.close(wait=False)
    hold.release.set()
    sup.close()
    assert running.result() is None
    assert all(future.cancelled() for future in queued)
    assert sup.stats().cancelled == 5


def test_a_callback_may_begin_to_close_its_supervisor(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=2) as sup:
        future = sup.submit(probe(hold))
        future.add_done_callback(lambda _: sup.close())
        hold.release.set()
    assert future.done()


def test_the_device_lets_its_supervisors_finish_before_it_closes(probe):
    old = dp.device("host")
    a = old.array(np.ones((2, 2), np.float32))
    stale = dp.MatmulRequest(a, a)
    with dp.Supervisor(old, streams=2) as sup:
        futures = sup.submit_many([probe(lambda i=i: i) for i in range(100)])
        old.close()
        assert [future.result(0) for future in futures] == list(range(100))
        with pytest.raises(Closed, match="with its device"):
            sup.submit(probe())
    with pytest.raises(StaleTensor):
        dp.Supervisor(old)
    with dp.Supervisor("host", streams=1) as sup, pytest.raises(StaleTensor, match="closed"):
        sup.submit(stale).result(PATIENCE)


def test_supervisors_may_be_nested_and_work_for_each_other(probe):
    with dp.Supervisor("host", streams=1) as outer:
        with dp.Supervisor("host", streams=1) as inner:
            through = outer.submit(probe(lambda: inner.submit(probe(lambda: 6)).result(PATIENCE)))
            assert through.result(PATIENCE) == 6
        assert outer.submit(probe(lambda: 7)).result(PATIENCE) == 7
        with pytest.raises(Closed):
            inner.submit(probe())


# -- workers that break ---------------------------------------------------------------------------------------------
def test_a_worker_that_breaks_is_replaced_and_the_queue_goes_on(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=1) as sup:
        sup.submit(probe(hold))
        assert hold.entered.wait(PATIENCE)
        bad, *good = sup.submit_many([probe(defect), *(probe(lambda i=i: i) for i in range(20))])
        hold.release.set()
        with pytest.raises(WorkerFailed, match=r"broke on probe\(\): ZeroDivisionError") as caught:
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
    assert "a Mute that has no words" in str(error)
    good = sup.submit(probe(lambda: 3))
    good.add_done_callback(lambda _: mute())
    assert good.result(PATIENCE) == 3
    with pytest.raises(Undelivered, match="a Mute that has no words") as told:
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
        late = LateFuture(probe(lambda: pytest.fail("it ran")), (other,))
        worker = queues[0].worker
        monkeypatch.setattr(worker, "_follow", fail)
        with contextlib.suppress(ZeroDivisionError, MemoryError):
            assert worker._unusual(late) is MISSED
        assert isinstance(late.exception(0), BadRequest if isinstance(error, BadRequest) else WorkerFailed)


def test_the_circuit_opens_when_workers_break_too_often(probe):
    hold = Hold()
    with dp.Supervisor("host", streams=2, max_restarts=2, max_seconds=1000) as sup:
        sup.submit(probe(hold), worker=1)
        assert hold.entered.wait(PATIENCE)
        behind = sup.submit(probe(), worker=1)
        broken = [sup.submit(probe(defect), worker=0) for _ in range(4)]
        for future in broken[:3]:
            with pytest.raises(WorkerFailed, match="broke on"):
                future.result(PATIENCE)
        with pytest.raises(WorkerFailed, match=r"broke 3 times in 1000 s \(max_restarts=2\)") as caught:
            broken[3].result(PATIENCE)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(WorkerFailed, match="make a new supervisor"):
            sup.submit(probe())
        assert "broken" in repr(sup)
        hold.release.set()
        with pytest.raises(WorkerFailed, match="broke 3 times"):
            behind.result(PATIENCE)
    assert sup.stats().restarts == 2


def test_breaks_that_lie_long_back_do_not_count(probe):
    with dp.Supervisor("host", streams=1, max_restarts=1, max_seconds=0) as sup:
        for _ in range(5):
            with pytest.raises(WorkerFailed, match="broke on"):
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


# -- without close() ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_supervisor_that_is_dropped_under_an_interrupt_ends_its_threads(isolation, monkeypatch):
    sup = dp.Supervisor("host", streams=2, isolation=isolation)
    pool, device, queue = sup._pool, sup.device, type(sup._pool.queues[0])
    wake, interrupts, ignored = queue.wake, [KeyboardInterrupt()], []

    def interrupted(self):
        if interrupts:
            raise interrupts.pop()
        wake(self)

    with monkeypatch.context() as patch:
        patch.setattr(queue, "wake", interrupted)
        patch.setattr(sys, "unraisablehook", lambda unraisable: ignored.append(unraisable.exc_value))
        del sup
        pool.join(PATIENCE)  # in here: who asks for its status holds it for a moment
    assert not [thread.name for thread in threading.enumerate() if re.search("worker|monitor thread", thread.name)]
    assert [type(error) for error in ignored] == [KeyboardInterrupt]
    if isolation == "process":
        device.close()


def test_a_supervisor_that_is_dropped_ends_its_threads_and_warns(probe, drop):
    hold = Hold()
    sup = dp.Supervisor("host", streams=2)
    workers = [queue.worker.thread for queue in sup._pool.queues]
    pool = weakref.ref(sup._pool)
    running = sup.submit(probe(hold), worker=0)
    assert hold.entered.wait(PATIENCE)
    queued = sup.submit(probe(), worker=0)
    left = [sup]
    del sup
    drop(left)
    hold.release.set()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive()
    assert running.result(PATIENCE) is None
    assert queued.cancelled()
    del workers, worker, running, queued
    gc.collect()
    assert pool() is None


EXIT = """
import runpy, threading
import dispatch as dp
tools = runpy.run_path({conftest!r})
Probe = tools["Probe"]
dp.register(tools["ROW"])
entered = threading.Event()
sup = dp.Supervisor("host", streams=2)
"""
CONFTEST = os.path.join(os.path.dirname(__file__), "conftest.py")


def test_an_interpreter_that_exits_does_not_hang_on_an_open_supervisor():
    begin = EXIT.format(conftest=CONFTEST)
    idle = run_script(begin + "print(sup.submit(Probe(lambda: 5)).result())")
    assert (idle.returncode, idle.stdout, idle.stderr) == (0, "5\n", "")
    stuck = run_script(
        begin + "sup.submit(Probe(lambda: (entered.set(), threading.Event().wait())))\nentered.wait()\nprint('leaving')"
    )
    assert (stuck.returncode, stuck.stdout, stuck.stderr) == (0, "leaving\n", "")


def test_a_forked_child_is_told_that_the_supervisor_stayed_behind():
    script = EXIT.format(conftest=CONFTEST) + (
        "import os, warnings\n"
        "release = threading.Event()\n"
        "running = sup.submit(Probe(lambda: (entered.set(), release.wait())), worker=0)\n"
        "queued = sup.submit(Probe(), worker=0)\n"
        "entered.wait()\n"
        "warnings.simplefilter('ignore')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    told = [type(f.exception(5)).__name__ for f in (running, queued)]\n"
        "    try:\n"
        "        sup.submit(Probe())\n"
        "    except dp.errors.Closed as error:\n"
        "        told.append('spawn' in str(error))\n"
        "    sup.close()\n"
        "    with dp.Supervisor('host', streams=1) as mine:\n"
        "        told.append(mine.submit(Probe(lambda: 3)).result(120))\n"
        "    print(told, flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "release.set()\n"
        "print(queued.result(120))\n"
        "sup.close()\n"
    )
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("['Closed', 'Closed', True, 3]\nNone\n", "")


def test_a_fork_while_another_thread_takes_a_request_back_does_not_hang():
    script = EXIT.format(conftest=CONFTEST) + (
        "import os, warnings\n"
        "from dispatch.supervise.waiters import open_waiting\n"
        "release = threading.Event()\n"
        "sup.submit(Probe(lambda: (entered.set(), release.wait())), worker=0)\n"
        "queued = sup.submit(Probe(), worker=0)\n"
        "entered.wait()\n"
        "waiting = open_waiting(queued)\n"
        "waiting.withdrawn.append((None, None))\n"  # as far as the other thread has come
        "del queued._request\n"
        "waiting.lock.acquire()\n"
        "warnings.simplefilter('ignore')\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(queued.done(), flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "waiting.lock.release()\n"
        "release.set()\n"
        "sup.close()\n"
    )
    done = run_script(script)
    assert (done.stdout, done.stderr) == ("True\n", "")
