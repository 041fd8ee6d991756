"""Requests that come again and again go to the child as runs and are launched there as series, with nothing lost.

The child's workers are those of a GPU over an executor of the host (tests/gpu_on_host.py).
"""

from __future__ import annotations

import random
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import DeadlineExceeded, DeviceFault
from dispatch.execute.bound import Bound
from dispatch.supervise.process import child_series, sending
from dispatch.supervise.process.child_jobs import compress_report
from dispatch.supervise.process.child_series import LONGEST, MAX_REQUESTS, RECORD_AFTER, SeriesCache

PATIENCE = 120  # seconds, on a machine that has other things to do


# -- through a child ----------------------------------------------------------------------------------------------
@pytest.fixture
def launches(tmp_path, monkeypatch):
    """How many requests each launch in the child had."""
    file = tmp_path / "launches"
    file.touch()
    monkeypatch.setenv("LAUNCHES", str(file))
    return lambda: [int(line) for line in file.read_text().split()]


@pytest.fixture
def open_supervisor(trouble):
    made = []

    def make(**options):
        options = {"streams": 1, "setup": (trouble.__name__, "gpu_on_host"), **options}
        made.append(dp.Supervisor("host", isolation="process", max_restarts=100, **options))
        return made[-1]

    yield make
    for sup in made:
        sup.device.close()


class Chain:
    """Requests each of which copies what the one before it made: their order counts."""

    def __init__(self, sup, trouble, length, odd=(), **fields):
        self.sup = sup
        self.cells = [sup.device.zeros(8) for _ in range(length + 1)]
        self.requests = [
            trouble.Trouble(a=a, out=out, **(fields if place in odd else {"kind": "fine"}))
            for place, (a, out) in enumerate(zip(self.cells, self.cells[1:], strict=False))
        ]

    def submit(self, value):
        np.asarray(self.cells[0])[:] = value
        return self.sup.submit_many(self.requests, worker=0)

    def check(self, value, futures=None):
        for future, cell in zip(futures or self.submit(value), self.cells[1:], strict=True):
            assert future.result(PATIENCE) is cell
        assert [float(np.asarray(cell)[0]) for cell in self.cells] == [value] * len(self.cells)

    def learn(self, launches):
        """Run it until it is launched as series."""
        ends = time.monotonic() + PATIENCE
        value = 1
        while not launches() or launches()[-1] == 1:
            assert time.monotonic() < ends
            self.check(value)
            value += 1


def test_a_list_that_comes_again_is_launched_as_a_few_series(open_supervisor, trouble, launches):
    with open_supervisor() as sup:
        chain = Chain(sup, trouble, 2 * LONGEST)
        chain.learn(launches)
        for value in range(100, 104):
            chain.check(value)
        before = len(launches())
        chain.check(200)
        assert sum(launches()[before:]) == 2 * LONGEST
        assert len(launches()) - before <= 4
        assert sup.stats().failed == 0


def test_requests_with_a_deadline_join_no_series_and_are_not_run_after_it(open_supervisor, trouble, launches, tmp_path):
    hold = trouble.Hold(tmp_path)
    with open_supervisor() as sup:
        chain = Chain(sup, trouble, 3 * LONGEST)
        chain.learn(launches)
        before = launches()
        for future in [sup.submit(request, timeout=PATIENCE) for request in chain.requests]:
            future.result(PATIENCE)
        assert all(count == 1 for count in launches()[len(before) :])
        chain.submit(1)[-1].result(PATIENCE)
        with hold:
            held = sup.submit(trouble.Trouble("held", sup.device.zeros(8), sup.device.zeros(8), hold.once))
            np.asarray(chain.cells[0])[:] = 2
            late = [sup.submit(request, timeout=0.5) for request in chain.requests]
            while not late[-1].expired:
                threading.Event().wait(0.01)
            hold.release()
            held.result(PATIENCE)
            assert {type(future.exception(PATIENCE)) for future in late} == {DeadlineExceeded}
        assert [float(np.asarray(cell)[0]) for cell in chain.cells[1:]] == [1] * (len(chain.cells) - 1)
        chain.check(3)


@pytest.mark.parametrize("streams", [1, 3])
def test_portions_of_a_list_in_any_order_give_what_each_request_gives(open_supervisor, trouble, launches, rng, streams):
    with open_supervisor(streams=streams) as sup:
        chain = Chain(sup, trouble, 50)
        chain.learn(launches)
        for value in range(20):
            np.asarray(chain.cells[0])[:] = value
            start, futures = 0, []
            while start < 50:
                portion = int(rng.integers(1, 20))
                after = futures[-1:]
                futures += sup.submit_many(
                    chain.requests[start : start + portion], worker=int(rng.integers(streams)), after=after
                )
                start += portion
            chain.check(value, futures)
        order = [int(place) for place in rng.permutation(50)]
        for future in sup.submit_many([chain.requests[place] for place in order]):
            assert future.exception(PATIENCE) is None


def test_a_child_that_is_killed_within_a_series_loses_nothing(open_supervisor, trouble, launches, tmp_path):
    hold = trouble.Hold(tmp_path)
    hold.release()
    with open_supervisor() as sup:
        chain = Chain(sup, trouble, LONGEST, odd=(LONGEST // 2,), kind="held", once=hold.once)
        chain.learn(launches)
        Path(hold.once).touch()
        before = len(launches())
        futures = chain.submit(77)
        ends = time.monotonic() + PATIENCE
        while len(launches()) == before:
            assert time.monotonic() < ends
        hold.release_behind(sup._pool._child.process.pid, signal.SIGKILL, PATIENCE)
        chain.check(77, futures)
        assert sup.generation == 2
        chain.learn(launches)  # the new child learns as the first did
        chain.check(78)
        assert sup.stats().failed == 0


@pytest.mark.parametrize("at", [0, 5, 15])
def test_a_request_that_ends_the_child_from_within_a_series_is_found(open_supervisor, trouble, launches, tmp_path, at):
    spared = tmp_path / "spared"
    spared.touch()
    with open_supervisor(max_seconds=600) as sup:
        vectors = [(sup.device.zeros(8), sup.device.zeros(8)) for _ in range(16)]
        requests = [trouble.Trouble("fine", *both) for both in vectors]
        requests[at] = trouble.Trouble("die", *vectors[at], once=str(spared))
        while not launches() or launches()[-1] == 1:
            for future in sup.submit_many(requests):
                assert future.exception(PATIENCE) is None
        ended = threading.Event()
        unlinker = threading.Thread(target=keep_away, args=(spared, ended))
        unlinker.start()
        while spared.exists():
            pass
        futures = sup.submit_many(requests)
        errors = [future.exception(PATIENCE) for future in futures]
        ended.set()
        unlinker.join()
        assert [type(error) for error in errors] == [DeviceFault if n == at else type(None) for n in range(16)]


def keep_away(file, ended):
    """Have a file not be there: it dies each time."""
    while not ended.wait(0.002):
        file.unlink(missing_ok=True)


def test_what_is_cancelled_in_a_list_is_not_run_and_all_else_is(open_supervisor, trouble, tmp_path, monkeypatch):
    monkeypatch.setattr(sending, "WINDOW", 4)
    hold = trouble.Hold(tmp_path)
    with open_supervisor() as sup, hold:
        fine = [trouble.Trouble("fine", sup.device.zeros(8), sup.device.zeros(8)) for _ in range(40)]
        held = trouble.Trouble("held", sup.device.zeros(8), sup.device.zeros(8), once=hold.once)
        blocked = sup.submit(held)
        futures = sup.submit_many([*fine, *fine, *fine])
        cancelled = {place for place in range(20, 120, 7) if futures[place].cancel()}
        assert len(cancelled) == 15
        hold.release()
        assert blocked.exception(PATIENCE) is None
        for place, future in enumerate(futures):
            if place in cancelled:
                assert future.cancelled()
            else:
                assert future.exception(PATIENCE) is None
        assert sup.stats().cancelled == len(cancelled)


def test_requests_that_are_gone_take_their_series_with_them(open_supervisor, trouble, launches):
    with open_supervisor() as sup:
        for _ in range(3):
            chain = Chain(sup, trouble, 16)
            chain.learn(launches)
            chain.check(5)
            del chain
        assert sup.stats().failed == 0


# -- what a worker knows of them -------------------------------------------------------------------------------------
class Recorder:
    """An executor that records anything, and notes it."""

    def __init__(self):
        self.plans, self.closed, self.recorded, self.launched = {}, False, [], []
        self.device = SimpleNamespace(fault=None)
        self.status, self.refusal = 0, None

    def record_calls(self, calls):
        if self.refusal is not None:
            raise self.refusal
        names = tuple(arguments[0] for _, arguments in calls)
        self.recorded.append(names)

        def launch():
            self.launched.append(names)
            return self.status

        return SimpleNamespace(launch=launch)

    def wait_for_uses(self, reads, writes):
        self.waited = True


def bound(executor, name):
    made = object.__new__(Bound)
    made.executor, made.plans, made.arguments, made.reads, made.writes = executor, executor.plans, (name,), (), ()
    made.plan = SimpleNamespace(launch=lambda: 0, counter=None, capture_safe=True)
    return SimpleNamespace(bound=made)


@pytest.fixture
def worker():
    executor = Recorder()
    known = {name: bound(executor, name) for name in range(1, 10_000)}
    return SimpleNamespace(executor=executor, known=known, all=SeriesCache(executor, known))


def go_through(worker, names):
    """Have a run come so often that its pieces are recorded."""
    for _ in range(RECORD_AFTER):
        for piece in worker.all.cut(names):
            worker.all.get(piece)
    while worker.all.learn():
        pass


def test_pieces_are_the_run_in_order_however_it_is_cut(worker):
    rng = random.Random(5)
    names = list(range(1, 300))
    for _ in range(300):
        start, length = rng.randrange(250), rng.randrange(1, 130)
        run = names[start : start + length]
        if rng.random() < 0.3:
            rng.shuffle(run)
        if rng.random() < 0.1:
            run = [rng.choice(run) for _ in run]
        pieces = worker.all.cut(tuple(run))
        assert [name for piece in pieces for name in piece] == run
        assert all(1 <= len(piece) <= LONGEST for piece in pieces)


def test_portions_of_a_list_have_its_pieces(worker):
    names = tuple(range(1, 129))
    go_through(worker, names)
    assert worker.executor.recorded == [names[n : n + LONGEST] for n in range(0, 128, LONGEST)]
    whole = set(worker.executor.recorded)
    for start in range(1, 32):
        assert set(worker.all.cut(names[start:])) >= {names[n : n + LONGEST] for n in range(LONGEST, 128, LONGEST)}
        assert set(worker.all.cut(names[: 128 - start])) & whole


def test_a_list_in_another_order_is_learnt_anew(worker):
    go_through(worker, tuple(range(1, 65)))
    shuffled = list(range(1, 65))
    random.Random(2).shuffle(shuffled)
    go_through(worker, tuple(shuffled))
    assert all(worker.all.find(piece) for piece in worker.all.cut(tuple(shuffled)))


def test_what_cannot_be_recorded_runs_one_by_one(worker):
    names = tuple(range(1, 33))
    worker.known[7].bound.plan.launch = None  # not learnt yet
    go_through(worker, names)
    assert worker.all.find(names) is None
    worker.known[7].bound.plan.launch = lambda: 0
    worker.known[8].bound.plan.counter = object()
    go_through(worker, names)
    assert worker.all.find(names) is None
    worker.known[8].bound.plan.counter = None
    worker.known[9].bound.plan.capture_safe = False  # launched by its library, not as a graph
    go_through(worker, names)
    assert worker.all.find(names) is None
    worker.known[9].bound.plan.capture_safe = True
    go_through(worker, names)
    assert worker.all.find(names).launch()
    assert worker.executor.launched == [names]


def test_a_recording_that_fails_is_not_tried_again_and_costs_nothing_else(worker):
    worker.executor.refusal = RuntimeError("cuGraphInstantiate")
    names = tuple(range(1, 33))
    go_through(worker, names)
    worker.executor.refusal = None
    go_through(worker, names)
    assert worker.all.find(names) is None
    worker.executor.refusal, worker.executor.device.fault = RuntimeError("lost"), RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        go_through(worker, tuple(range(65, 97)))


def test_a_series_whose_plans_were_let_go_launches_nothing(worker):
    names = tuple(range(1, 33))
    go_through(worker, names)
    series = worker.all.find(names)
    worker.executor.status = 1
    assert not series.launch()
    worker.executor.status, before = 0, len(worker.executor.launched)
    worker.executor.plans = {}
    assert not series.launch()
    assert len(worker.executor.launched) == before


def test_what_is_kept_is_bounded_and_goes_with_its_requests(worker, monkeypatch):
    monkeypatch.setattr(child_series, "MAX_REQUESTS", 64)
    for start in range(1, 321, 32):
        go_through(worker, tuple(range(start, start + 32)))
    assert sum(map(len, worker.all._all)) <= 64 < MAX_REQUESTS
    for name in range(1, 400):
        worker.all.forget((name,))
    assert not worker.all._all
    assert not worker.all._series_of
    assert not worker.all._positions


def test_a_busy_worker_records_too(worker):
    assert not worker.all.is_due
    names = tuple(range(1, 33))
    while not worker.all.is_due:
        for piece in worker.all.cut(names):
            worker.all.get(piece)
    worker.all.learn()
    assert not worker.all.is_due
    assert worker.all.find(names)


def test_a_report_says_successive_numbers_in_short():
    error = (9, b"error")
    assert compress_report([]) == []
    assert compress_report([5]) == [5]
    assert compress_report([1, 2, 3, 5, (6, 4), 10, 12, error, (13, 2), (15, b""), 16]) == [
        (1, 3),
        (5, 6),
        12,
        error,
        (13, 2),
        (15, b""),
        16,
    ]
