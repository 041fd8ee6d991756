"""Who waits reads what the child reports, and hands that over to the monitor thread.

That looks at nothing of itself here, as it does at each tick otherwise: what it is not told to read is never read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise.process import monitor, remote_queue

PATIENCE = 120  # seconds, on a machine that has other things to do
AWAY = PATIENCE * 10  # seconds between two looks of the monitor thread that nobody asks for
SLEEPS = 0.2  # seconds in which one who waits has long stopped looking, and sleeps at the connection


@pytest.fixture
def sup(trouble, monkeypatch):
    monkeypatch.setattr(monitor, "TICK", AWAY)
    with dp.Supervisor("host", streams=1, isolation="process", setup=(trouble.__name__,)) as made:
        yield made
    made.device.close()


@pytest.fixture
def hold(trouble, tmp_path):
    with trouble.Hold(tmp_path) as made:
        yield made


@pytest.fixture
def held(sup, trouble, hold):
    """A request that does not end before `hold` is released."""
    sup.submit(request_of(sup)).result(PATIENCE)
    return trouble.Trouble("held", sup.device.zeros(8), sup.device.zeros(8), once=hold.once)


def request_of(sup):
    a = sup.device.array(np.eye(4, dtype=np.float32))
    return dp.MatmulRequest(a, a, out=sup.device.zeros((4, 4)))


def told(future):
    """Set once the callbacks of a future are called."""
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event


def started(target):
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def is_read(sup):
    """Wait until somebody reads in the place of the monitor thread, and sleeps."""
    ends = time.monotonic() + PATIENCE
    while not sup._pool.queues[0].recv_lock.locked() and time.monotonic() < ends:
        time.sleep(0.001)
    assert sup._pool.queues[0].recv_lock.locked()


@pytest.fixture
def long_reads(monkeypatch):
    """Who reads does so until what it waits for has ended."""
    monkeypatch.setattr(remote_queue, "REPORT_WAIT", AWAY)


def test_what_nobody_waits_for_is_told_of_after_others_have_waited(sup):
    request = request_of(sup)
    for _ in range(20):
        sup.submit(request).result(PATIENCE)
        assert told(sup.submit(request)).wait(PATIENCE)


@pytest.mark.usefixtures("long_reads")
def test_of_two_who_wait_the_one_who_does_not_read_is_told_as_well(sup, held, hold):
    first, second = sup.submit(held), sup.submit(request_of(sup))
    found = []
    waiting = [started(lambda: found.append(second.result(PATIENCE)))]
    is_read(sup)
    waiting.append(started(lambda: found.append(first.result(PATIENCE))))
    hold.release()
    for thread in waiting:
        thread.join(PATIENCE)
    assert len(found) == 2


def test_one_who_reads_and_runs_out_of_time_leaves_the_reading_to_the_monitor_thread(sup, held, hold):
    future = sup.submit(held)
    with pytest.raises(TimeoutError):
        future.result(SLEEPS)
    event = told(future)
    hold.release()
    assert event.wait(PATIENCE)


@pytest.mark.usefixtures("long_reads")
def test_a_callback_that_comes_while_somebody_reads_is_called_by_the_monitor_thread(sup, held, hold):
    future, called = sup.submit(held), []
    waits = started(lambda: future.result(PATIENCE))
    is_read(sup)
    future.add_done_callback(lambda _: called.append(threading.current_thread()))
    event = told(future)
    hold.release()
    assert event.wait(PATIENCE)
    waits.join(PATIENCE)
    assert called == [sup._pool._monitor]


@pytest.mark.usefixtures("long_reads")
def test_a_child_that_is_killed_while_somebody_reads_is_replaced(sup, held, hold):
    future, found = sup.submit(held), []
    waits = started(lambda: found.append(future.result(PATIENCE)))
    is_read(sup)
    hold.release_behind(sup._pool._child.process.pid, signal.SIGKILL, PATIENCE)
    waits.join(PATIENCE)
    assert len(found) == 1
    assert sup._pool.generation == 2
    assert told(sup.submit(request_of(sup))).wait(PATIENCE)


@pytest.mark.usefixtures("long_reads")
def test_ctrl_c_in_one_who_reads_leaves_the_reading_to_the_monitor_thread(sup, held, hold):
    future = sup.submit(held)

    def interrupt():
        is_read(sup)
        time.sleep(SLEEPS)
        os.kill(os.getpid(), signal.SIGINT)

    thread = started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        future.result(PATIENCE)
    thread.join(PATIENCE)
    event = told(future)
    hold.release()
    assert event.wait(PATIENCE)


@pytest.mark.parametrize("streams", [1, 3])
def test_threads_that_wait_or_do_not_are_all_told(monkeypatch, rng, streams):
    """Each of them hands the reading over to the others again and again."""
    monkeypatch.setattr(monitor, "TICK", AWAY)
    problems = []

    def use(sup, seed):
        request, draw = request_of(sup), np.random.default_rng(seed)
        for kind in draw.integers(0, 4, 300):
            future = sup.submit(request)
            if kind == 0:
                ended = told(future).wait(PATIENCE)
            elif kind == 1:
                with contextlib.suppress(TimeoutError):
                    future.result(draw.uniform(0, 1e-4))
                ended = told(future).wait(PATIENCE)
            else:
                future.result(PATIENCE)
                ended = True
            if not ended:
                problems.append(kind)
                return

    with dp.Supervisor("host", streams=streams, isolation="process") as sup:
        threads = [started(lambda seed=seed: use(sup, seed)) for seed in rng.integers(0, 1 << 32, 4)]
        for thread in threads:
            thread.join(PATIENCE)
        sup._pool.wake_monitor()  # where something was not told of, the supervisor is to end all the same
    sup.device.close()
    assert not problems
    assert not any(thread.is_alive() for thread in threads)
