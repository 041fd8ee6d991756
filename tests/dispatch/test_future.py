"""Futures: each ends once, whoever waits is told, from threads, asyncio and concurrent.futures alike."""

import asyncio
import concurrent.futures
import copy
import pickle
import threading
import weakref

import pytest

from dispatch.errors import BadRequest, Undelivered
from dispatch.supervise.future import ALREADY_CLAIMED, CANCELLED, DELIVERED, DONE, FAILED, Future, TimedFuture

PATIENCE = 120  # seconds, on a machine that has other things to do


class Operand:
    """Stands for a request; a future never looks at it."""


def settled(status: int, value: object) -> Future:
    future = Future(Operand())
    future.claim()
    future.settle(status, value)
    return future


def test_a_result_is_returned_as_often_as_it_is_asked_for():
    future = settled(DONE, "outputs")
    assert [future.result(), future.result(0)] == ["outputs", "outputs"]
    assert future.exception() is None
    assert future.done()
    assert not future.running()
    assert not future.cancelled()


def test_a_failure_is_raised_and_counts_as_delivered_only_then():
    error = BadRequest("a", "this", "that")
    future = settled(FAILED, error)
    assert future.done()
    assert future._status == FAILED
    assert future.exception() is error
    assert future._status == DELIVERED
    with pytest.raises(BadRequest, match="got this") as caught:
        future.result()
    assert caught.value is error


def test_only_one_claims():
    future = Future(Operand())
    wins = []
    barrier = threading.Barrier(8)

    def claim() -> None:
        barrier.wait(PATIENCE)
        if future.claim() is not ALREADY_CLAIMED:
            wins.append(1)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert wins == [1]
    assert future.running()


def test_cancel_takes_the_request_back_before_it_starts_and_not_after():
    future = Future(Operand())
    assert future.cancel()
    assert future.cancel()
    assert future.cancelled()
    assert future.claim() is ALREADY_CLAIMED
    for ask in (future.result, future.exception):
        with pytest.raises(concurrent.futures.CancelledError, match="before it started"):
            ask()
    started = Future(Operand())
    started.claim()
    assert not started.cancel()
    assert started.running()


def test_a_cancelled_future_lets_its_request_go():
    operand = Operand()
    alive = weakref.ref(operand)
    future = Future(operand)
    del operand
    future.cancel()
    assert alive() is None


def test_waiting_ends_with_the_result_of_another_thread():
    future = Future(Operand())
    future.claim()
    entered = threading.Event()
    results = []

    def wait() -> None:
        entered.set()
        results.append(future.result(PATIENCE))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    entered.wait(PATIENCE)
    future.settle(DONE, 7)
    for thread in threads:
        thread.join(PATIENCE)
    assert results == [7] * 4


def test_a_wait_that_took_too_long_leaves_nothing_behind():
    future = Future(Operand())
    for timeout in (0, -1, 1e-6):
        with pytest.raises(TimeoutError, match="has not completed"):
            future.result(timeout)
    assert future._wait_list.gates == []
    future.settle(DONE, 1)
    assert future.result(1e12) == 1


def test_callbacks_run_once_and_late_ones_at_once():
    seen = []
    future = Future(Operand())
    future.add_done_callback(lambda f: seen.append(("early", f.result())))
    future.settle(DONE, 5)
    future.add_done_callback(lambda f: seen.append(("late", f.result())))
    assert seen == [("early", 5), ("late", 5)]


def test_what_a_callback_raises_comes_back_from_settle_and_the_others_still_run():
    seen = []
    future = Future(Operand())
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(seen.append)
    errors = future.settle(DONE, None)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert seen == [future]
    cancelled = Future(Operand())
    cancelled.add_done_callback(lambda _: 1 / 0)
    with pytest.raises(Undelivered, match="division by zero"):
        cancelled.cancel()
    assert cancelled.cancelled()


def test_settling_and_waiting_at_the_same_moment_misses_nobody():
    for round_ in range(300):
        future = Future(Operand())
        barrier = threading.Barrier(3)
        told = []

        def settle(future=future, barrier=barrier, round_=round_) -> None:
            barrier.wait(PATIENCE)
            future.settle(DONE, round_)

        def call_back(future=future, barrier=barrier, told=told) -> None:
            barrier.wait(PATIENCE)
            future.add_done_callback(told.append)

        threads = [threading.Thread(target=settle), threading.Thread(target=call_back)]
        for thread in threads:
            thread.start()
        barrier.wait(PATIENCE)
        assert future.result(PATIENCE) == round_
        for thread in threads:
            thread.join(PATIENCE)
        assert told == [future]


def test_concurrent_futures_can_wait_for_them():
    futures = [Future(Operand()) for _ in range(10)]
    futures[3].settle(DONE, 3)
    done, pending = concurrent.futures.wait(futures, timeout=0)
    assert done == {futures[3]}
    assert len(pending) == 9

    def settle() -> None:
        for number, future in enumerate(futures):
            if number == 4:
                future.cancel()
            elif number != 3:
                future.settle(FAILED if number == 5 else DONE, ValueError() if number == 5 else number)

    thread = threading.Thread(target=settle)
    thread.start()
    assert set(concurrent.futures.as_completed(futures, timeout=PATIENCE)) == set(futures)
    thread.join(PATIENCE)
    done, pending = concurrent.futures.wait(futures, timeout=0)
    assert len(done) == 10
    assert not pending


def test_concurrent_futures_let_go_of_what_ends_while_they_hold_it():
    """They ask for the condition once more to release it; who settles the future waits for that."""
    future, over = Future(Operand()), threading.Event()

    def hold():
        future._condition.acquire()
        future._status = DONE  # as whoever settles it, who comes to telling of it only when the lock is free
        future._condition.release()
        over.set()

    threading.Thread(target=hold, daemon=True).start()
    assert over.wait(PATIENCE)
    assert future._condition.acquire(blocking=False)
    assert future._wait_list.is_notified
    future._condition.release()


@pytest.mark.parametrize("when", ["FIRST_COMPLETED", "ALL_COMPLETED"])
def test_concurrent_futures_wait_while_they_are_settled(when):
    for _ in range(50):
        futures = [Future(Operand()) for _ in range(20)]
        thread = threading.Thread(target=lambda futures=futures: [future.settle(DONE, 1) for future in futures])
        thread.start()
        done, pending = concurrent.futures.wait(futures, timeout=PATIENCE, return_when=when)
        assert done if when == "FIRST_COMPLETED" else not pending
        assert all(future.done() for future in done)
        thread.join(PATIENCE)


def test_asyncio_awaits_thousands_that_another_thread_settles():
    futures = [Future(Operand()) for _ in range(3000)]

    def settle() -> None:
        for number, future in enumerate(futures):
            future.settle(DONE, number)

    async def main() -> list[int]:
        tasks = [asyncio.ensure_future(future) for future in futures]
        await asyncio.sleep(0)  # so that all of them wait
        thread = threading.Thread(target=settle)
        thread.start()
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == list(range(3000))


def test_asyncio_cancellation_takes_the_request_back():
    future, started, failed = Future(Operand()), Future(Operand()), settled(FAILED, ValueError("bad"))
    started.claim()

    async def main() -> None:
        for waited in (future, started):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(waited, 0.001)
        with pytest.raises(ValueError, match="bad"):
            await failed
        with pytest.raises(asyncio.CancelledError):
            await future

    asyncio.run(main())
    assert future.cancelled()
    assert started.running()
    started.settle(DONE, None)  # the loop that waited is closed: nobody is told, and nothing is raised
    assert started.done()


def test_a_loop_that_closed_is_not_woken():
    future = Future(Operand())
    waiting = []

    async def main() -> None:
        waiting.append(asyncio.ensure_future(future))
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    future.claim()
    (task,) = waiting
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    assert future.settle(DONE, 1) == []


def test_a_timed_future_has_another_slot_to_claim():
    future = TimedFuture(Operand(), deadline=float("inf"))
    assert not hasattr(future, "_request")
    assert not future.running()
    assert not future.expired
    assert TimedFuture(Operand(), deadline=0).expired
    assert future.claim() is not ALREADY_CLAIMED
    assert future.claim() is ALREADY_CLAIMED
    assert future.running()
    assert TimedFuture(Operand(), deadline=0).cancel()


def test_repr_says_how_it_is():
    future = Future(Operand())
    assert repr(future) == "<Future pending>"
    future.claim()
    assert repr(future) == "<Future running>"
    future.settle(CANCELLED, None)
    assert repr(future) == "<Future cancelled>"


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda how: how.__name__)
@pytest.mark.parametrize("future", [settled(DONE, 1), Future(Operand())], ids=["ended", "open"])
def test_a_future_is_not_copied(how, future):
    """A copy of an open one would never end."""
    with pytest.raises(TypeError, match="a Future cannot be copied or pickled: use its result"):
        how(future)
