"""Load on the host: priorities, requests that wait for others, pools, and what is dropped where queues are full."""

from __future__ import annotations

import itertools
import threading
from collections import deque

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, DependencyFailed, QueueFull
from dispatch.supervise.future import ConditionalFuture, Future
from dispatch.supervise.placement import shares
from dispatch.supervise.priority_queue import ORDERS, PriorityQueue
from dispatch.supervise.queue import WorkerQueue

PATIENCE = 120  # seconds, on a machine that has other things to do


class Hold:
    """Keeps a worker busy from `entered` until `release`."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


def refuse() -> None:
    raise BadRequest("a", "this", "that")


def held(sup, probe, worker=0):
    """Have a worker be busy until the Hold that comes back is released."""
    hold = Hold()
    sup.submit(probe(hold), worker=worker)
    assert hold.entered.wait(PATIENCE)
    return hold


# -- the queue itself -----------------------------------------------------------------------------------------------
def test_a_queue_of_levels_takes_the_smaller_priority_first_and_each_level_in_order():
    middle = deque(Future(name) for name in "abc")
    levels = PriorityQueue(middle, None)
    levels.put([Future("x"), Future("y")], 1)
    levels.put([Future("0")], -1)
    levels.append(Future("d"))
    middle.append(Future("e"))  # by a thread that still holds the deque
    assert len(levels) == 8
    assert "".join(levels.popleft()._request for _ in range(5)) == "0abcd"
    levels.put([Future("1")], -1)
    assert [future._request for future in levels] == ["1", "e", "x", "y"]
    assert "".join(levels.popleft()._request for _ in range(4)) == "1exy"
    assert not levels
    with pytest.raises(IndexError):
        levels.popleft()


def test_no_level_waits_for_ever_behind_the_others():
    levels = PriorityQueue(deque(), None)
    for priority in (-1, 0, 1):
        levels.put([Future(priority) for _ in range(100)], priority)
    taken = [levels.popleft()._request for _ in range(64)]
    assert [taken.count(priority) for priority in (-1, 0, 1)] == [56, 4, 4]
    assert {order[0] for order in ORDERS} == {0, 1, 2}


def test_no_level_waits_for_ever_where_requests_are_sent_before_they_are_taken_out():
    levels = PriorityQueue(deque(), None)
    for priority in (-1, 0, 1):
        levels.put([Future(priority) for _ in range(100)], priority)
    taken = []
    for _ in range(64):
        taken.append(levels.first())
        levels.remove(taken[-1])
    assert [sum(future._request == priority for future in taken) for priority in (-1, 0, 1)] == [56, 4, 4]
    levels.clear()
    assert (len(levels), list(levels)) == (0, [])


def test_what_may_not_start_holds_up_its_own_level_only_and_is_taken_once_released():
    levels = PriorityQueue(deque(), lambda late: late.after == ())
    waiting = ConditionalFuture("waits", (Future("first"),))
    levels.put([waiting, Future("behind")], 0)
    assert not levels
    assert len(levels) == 2
    levels.put([Future("low")], 1)
    assert levels
    assert levels.popleft()._request == "low"
    with pytest.raises(IndexError):
        levels.popleft()
    waiting.after = ()
    assert levels.popleft() is waiting
    waiting = ConditionalFuture("waits", (Future("first"),))
    levels.put([waiting], -1)
    assert levels.popleft()._request == "behind"
    levels.release()
    assert levels.popleft() is waiting


def test_the_oldest_of_the_lowest_level_is_dropped():
    levels = PriorityQueue(deque([Future("a")]), lambda _: False)
    levels.put([ConditionalFuture("x", (Future("never"),)), Future("y")], 1)
    for name in "xya":
        oldest = levels.oldest()
        assert oldest.claim() == name
        levels.remove(oldest)
    with pytest.raises(ValueError, match="it was removed"):
        levels.remove(oldest)
    with pytest.raises(IndexError):
        levels.oldest()


# -- priorities -----------------------------------------------------------------------------------------------------
def test_the_smaller_priority_runs_first_and_equals_in_order(probe):
    ran = []
    with dp.Supervisor("host", streams=1) as sup:
        hold = held(sup, probe)
        for index, priority in enumerate((1, 0, -1, 0, -1, 1)):
            sup.submit(probe(lambda i=index: ran.append(i)), priority=priority)
        sup.submit_many([probe(lambda: ran.append("many"))], priority=-1)
        hold.release.set()
    assert ran == [2, 4, "many", 1, 3, 0, 5]
    assert (sup.stats().done, sup.stats().queued) == (8, 0)


@pytest.mark.parametrize("priority", [2, -2, "high", 1.0])
def test_a_priority_that_is_none_names_what_is_accepted(probe, priority):
    with dp.Supervisor("host", streams=1) as sup:
        with pytest.raises(BadRequest, match="-1 or 0 or 1"):
            sup.submit(probe(), priority=priority)
        with pytest.raises(BadRequest, match="-1 or 0 or 1"):
            sup.submit_many([probe()], priority=priority)


def test_what_has_a_priority_is_cancelled_when_the_supervisor_ends(probe):
    sup = dp.Supervisor("host", streams=1)
    hold = held(sup, probe)
    futures = [sup.submit(probe(), priority=priority) for priority in (-1, 0, 1)]
    waits = sup.submit(probe(), after=futures)
    sup.close(wait=False)
    hold.release.set()
    sup.close()
    assert all(future.cancelled() for future in (*futures, waits))
    assert sup.stats().cancelled == 4


# -- after ----------------------------------------------------------------------------------------------------------
def test_a_request_runs_after_those_it_names_on_other_workers(probe):
    ran = []
    with dp.Supervisor("host", streams=3) as sup:
        hold = held(sup, probe, worker=0)
        first = sup.submit(probe(lambda: ran.append("first")), worker=0)
        second = sup.submit(probe(lambda: ran.append("second")), worker=1, after=[first])
        third = sup.submit(probe(lambda: ran.append("third")), worker=2, after=[first, second], timeout=PATIENCE)
        behind = sup.submit(probe(lambda: ran.append("behind")), worker=2)
        assert sup.submit(probe(lambda: 5), worker=1, priority=-1).result(PATIENCE) == 5, "the worker is not held up"
        assert not behind.done()
        assert sup.stats().queued == 4
        hold.release.set()
        behind.result(PATIENCE)
    assert ran == ["first", "second", "third", "behind"]
    assert third.done()


def test_after_what_has_ended_there_is_nothing_to_wait_for(probe):
    with dp.Supervisor("host", streams=2) as sup, dp.Supervisor("host", streams=1) as other:
        first = sup.submit(probe(lambda: 1), worker=0)
        assert first.result(PATIENCE) == 1
        assert sup.submit(probe(lambda: 2), worker=1, after=[first]).result(PATIENCE) == 2
        hold = held(other, probe)
        elsewhere = other.submit(probe(lambda: 3))
        late = sup.submit_many([probe(lambda: 4), probe(lambda: 5)], after=elsewhere)
        hold.release.set()
        assert [future.result(PATIENCE) for future in late] == [4, 5]


def test_a_failure_or_a_cancellation_fails_what_waits_for_it(probe):
    with dp.Supervisor("host", streams=2) as sup:
        hold = held(sup, probe)
        bad, back = sup.submit(probe(refuse), worker=0), sup.submit(probe(), worker=0)
        assert back.cancel()
        ran = []
        first = sup.submit(probe(lambda: ran.append(1)), worker=1, after=[bad])
        second = sup.submit(probe(lambda: ran.append(2)), worker=0, after=[first])
        third = sup.submit(probe(lambda: ran.append(3)), worker=1, after=[back])
        hold.release.set()
        with pytest.raises(DependencyFailed, match="failed: BadRequest") as caught:
            first.result(PATIENCE)
        assert caught.value.__cause__ is bad.exception(PATIENCE)
        with pytest.raises(DependencyFailed, match="failed: DependencyFailed"):
            second.result(PATIENCE)
        with pytest.raises(DependencyFailed, match="was cancelled"):
            third.result(PATIENCE)
        assert not ran
        assert sup.submit(probe(lambda: 6), worker=1).result(PATIENCE) == 6


def test_all_of_a_batch_runs_after_those_it_names_however_they_are_given(probe):
    order: list[int] = []
    with dp.Supervisor("host", streams=2) as sup:
        hold = held(sup, probe)
        first = sup.submit(probe(lambda: order.append(0)), worker=0)
        futures = sup.submit_many([probe(lambda: order.append(1)) for _ in range(4)], worker=1, after=iter([first]))
        assert all(isinstance(future, ConditionalFuture) and future.after == (first,) for future in futures)
        hold.release.set()
    assert order == [0, 1, 1, 1, 1]


def test_only_futures_can_be_waited_for(probe):
    with dp.Supervisor("host", streams=1) as sup, pytest.raises(BadRequest, match="futures"):
        sup.submit(probe(), after=[probe()])


def test_random_priorities_and_dependencies_never_block_each_other(probe, rng):
    lock = threading.Lock()
    place: dict[int, int] = {}
    numbers = itertools.count()

    def run(index: int) -> None:
        with lock:
            place[index] = next(numbers)

    count = 1500
    waits = [sorted({int(x) for x in rng.integers(0, i, rng.integers(0, 4))} if i else ()) for i in range(count)]
    with dp.Supervisor("host", streams=4, queue_size=4096) as sup:
        holds = [held(sup, probe, worker) for worker in range(4)]
        futures: list[dp.Future] = []
        for index in range(count):
            futures.append(
                sup.submit(
                    probe(lambda i=index: run(i)),
                    worker=int(rng.integers(4)),
                    priority=int(rng.integers(-1, 2)),
                    after=[futures[i] for i in waits[index]],
                )
            )
        for hold in holds:
            hold.release.set()
        for future in futures:
            future.result(PATIENCE)
    assert all(place[before] < place[index] for index in range(count) for before in waits[index])


# -- pools ----------------------------------------------------------------------------------------------------------
def test_a_request_may_name_a_pool_of_workers(probe):
    with dp.Supervisor("host", streams=4) as sup:
        hold = held(sup, probe, worker=2)
        name = probe(lambda: threading.current_thread().name)
        assert {sup.submit(name, worker=(1, 2)).result(PATIENCE)[-1] for _ in range(4)} == {"1"}
        hold.release.set()
        for pool in ((), (1, 4), ("1",)):
            with pytest.raises(BadRequest, match="or some of them"):
                sup.submit(probe(), worker=pool)


# -- the oldest is dropped --------------------------------------------------------------------------------------------
def test_a_full_queue_drops_the_oldest_if_asked_to(probe):
    told = []
    with dp.Supervisor("host", streams=1, queue_size=3, when_full="drop_oldest") as sup:
        hold = held(sup, probe)
        old = [sup.submit(probe(lambda i=i: i)) for i in range(3)]
        old[0].add_done_callback(lambda future: told.append(type(future.exception())))
        new = [sup.submit(probe(lambda i=i: 10 + i)) for i in range(2)]
        with pytest.raises(
            QueueFull, match=r"dropped in favour of a newer request.*the queue of worker 0 of host is full \(3"
        ):
            old[0].result(0)
        assert told == [QueueFull]
        assert isinstance(old[1].exception(0), QueueFull)
        assert not old[2].done()
        assert sup.stats().queued == 3
        hold.release.set()
        assert [future.result(PATIENCE) for future in (old[2], *new)] == [2, 10, 11]
        assert (sup.stats().done, sup.stats().failed) == (4, 2)


def test_nothing_is_dropped_where_another_worker_has_room(probe):
    with dp.Supervisor("host", streams=2, queue_size=2, when_full="drop_oldest") as sup:
        holds = [held(sup, probe, worker) for worker in range(2)]
        futures = [sup.submit(probe(), worker=worker) for worker in (0, 0, 1)]
        queues = sup._pool.queues
        assert sup._pool.wait_for_room(queues, "drop_oldest", None) is queues[1]
        assert not any(future.done() for future in futures)
        for hold in holds:
            hold.release.set()


def test_a_batch_goes_where_there_is_room_though_others_have_less_to_do(probe):
    full, busy = WorkerQueue(0, 1), WorkerQueue(1, 1)
    full.pending.append(Future(probe()))
    busy.busy = 5
    assert shares(1, [full, busy]) == [(busy, 1)]
    assert shares(1, [full]) == []


def test_what_is_dropped_is_of_the_least_priority(probe):
    with dp.Supervisor("host", streams=1, queue_size=2, when_full="drop_oldest") as sup:
        hold = held(sup, probe)
        low, high = sup.submit(probe(), priority=1), sup.submit(probe(lambda: 1), priority=-1)
        last = sup.submit(probe(lambda: 2))
        assert isinstance(low.exception(0), QueueFull)
        hold.release.set()
        assert (high.result(PATIENCE), last.result(PATIENCE)) == (1, 2)


def test_a_batch_that_does_not_fit_keeps_the_newest(probe):
    with dp.Supervisor("host", streams=2, queue_size=4, when_full="drop_oldest") as sup:
        holds = [held(sup, probe, worker) for worker in range(2)]
        back = sup.submit(probe())
        assert back.cancel()
        futures = sup.submit_many([probe(lambda i=i: i) for i in range(30)])
        dropped = [future for future in futures if future.done()]
        assert len(dropped) == 22
        assert {type(future.exception(0)) for future in dropped} == {QueueFull}
        for hold in holds:
            hold.release.set()
        for index, future in enumerate(futures):
            if future not in dropped:
                assert future.result(PATIENCE) == index
        stats = sup.stats()
        assert (stats.done, stats.failed, stats.cancelled) == (10, 22, 1)


def test_dropping_while_workers_take_ends_each_future_once(probe):
    ends: dict[int, int] = {}
    lock = threading.Lock()

    def ended(number: int) -> None:
        with lock:
            ends[number] = ends.get(number, 0) + 1

    def submit(start: int) -> None:
        for number in range(start, start + 1000):
            future = sup.submit(probe(), priority=number % 3 - 1)
            future.add_done_callback(lambda _, number=number: ended(number))
            futures.append(future)

    futures: list[dp.Future] = []
    with dp.Supervisor("host", streams=2, queue_size=4, when_full="drop_oldest") as sup:
        threads = [threading.Thread(target=submit, args=(1000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        failed = sum(isinstance(future.exception(PATIENCE), QueueFull) for future in futures)
    assert ends == dict.fromkeys(range(4000), 1)
    stats = sup.stats()
    assert (stats.done + stats.failed, stats.failed) == (4000, failed)
