"""Load before a child process: priorities, requests that wait for others, what is dropped, and memory that is short."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, DeadlineExceeded, DependencyFailed, DeviceFault, OutOfMemory, QueueFull
from dispatch.supervise.future import TOO_LATE, Future
from dispatch.supervise.process import sending
from dispatch.supervise.process.shared_device import make_shared_device

PATIENCE = 120  # seconds, on a machine that has other things to do
MIB = 1 << 20


@pytest.fixture
def remote(trouble):
    made = []

    def make(**options):
        options = {"streams": 2, "setup": (trouble.__name__,), "isolation": "process", **options}
        made.append(dp.Supervisor("host", **options))
        return made[-1]

    yield make
    for sup in made:
        sup.device.close()


def chain(sup, trouble, length, kind="fine", once="", **options):
    """Requests each of which copies what the one before it made, at every worker in turn."""
    cells = [sup.device.array(np.full(8, value, np.float32)) for value in (7, *[0] * length)]
    futures: list[dp.Future] = []
    for index in range(length):
        what = {"kind": kind, "once": once} if index == 0 else {"kind": "fine"}
        request = trouble.Trouble(a=cells[index], out=cells[index + 1], **what)
        futures.append(sup.submit(request, worker=index % 2, after=futures[-1:], **options))
    return futures, cells


def test_requests_in_a_child_run_after_those_they_name(remote, trouble):
    with remote() as sup:
        futures, cells = chain(sup, trouble, 20, "slow", timeout=PATIENCE)
        assert [future.result(PATIENCE) for future in futures] == cells[1:]
        assert (cells[-1].numpy() == 7).all()
        assert sup.stats().done == 20


def test_a_failure_in_a_child_fails_what_waits_for_it(remote, trouble):
    with remote() as sup:
        futures, cells = chain(sup, trouble, 4, "raise")
        assert {type(future.exception(PATIENCE)) for future in futures[1:]} == {DependencyFailed}
        assert futures[0].exception(PATIENCE)
        assert (cells[-1].numpy() == 0).all()


def test_a_queue_before_a_child_has_priorities_and_drops_the_oldest(remote, trouble, monkeypatch, tmp_path):
    monkeypatch.setattr(sending, "WINDOW", 1)
    ended = []
    hold = trouble.Hold(tmp_path)
    with remote(streams=1, queue_size=3, when_full="drop_oldest") as sup, hold:
        x = sup.device.zeros(8)
        make = [trouble.Trouble("held", x, sup.device.zeros(8), once=hold.once) for _ in range(6)]
        running = sup.submit(make[0])
        futures = [
            sup.submit(request, priority=priority) for request, priority in zip(make[1:], (0, 1, 0, -1, 0), strict=True)
        ]
        for index, future in enumerate(futures):
            future.add_done_callback(lambda _, index=index: ended.append(index))
        assert [isinstance(futures[i].exception(0), QueueFull) for i in (0, 1)] == [True, True]
        hold.release()
        running.result(PATIENCE)
    assert ended == [0, 1, 3, 2, 4]


def test_random_dependencies_over_four_workers_are_kept(remote, trouble, rng):
    count = 400
    with remote(streams=4) as sup:
        cells = [sup.device.array(np.full(8, value, np.float32)) for value in (7, *[0] * count)]
        futures: list[dp.Future] = []
        for index in range(count):
            source = int(rng.integers(max(0, index - 12), index + 1))  # the cell that the request before it made
            before = [futures[source - 1]] if source else []
            others = [futures[int(i)] for i in rng.integers(0, index, 2)] if index else []
            request = trouble.Trouble("fine", cells[source], cells[index + 1])
            worker, priority = int(rng.integers(4)), int(rng.integers(-1, 2))
            futures.append(sup.submit(request, worker=worker, priority=priority, after=before + others))
        assert [future.result(PATIENCE) for future in futures] == cells[1:]
        assert all((cell.numpy() == 7).all() for cell in cells)


def test_a_chain_goes_on_when_its_child_is_killed(remote, trouble, tmp_path):
    with remote(max_restarts=10, max_seconds=600) as sup:
        hold = trouble.Hold(tmp_path)
        futures, cells = chain(sup, trouble, 30, "held", once=hold.once)
        hold.release_behind(sup._pool._child.process.pid, signal.SIGKILL, PATIENCE)
        assert [future.result(PATIENCE) for future in futures] == cells[1:]
        assert (cells[-1].numpy() == 7).all()


def test_what_waits_for_a_guilty_request_is_not_run(remote, trouble):
    with remote(max_restarts=10, max_seconds=600) as sup:
        futures, cells = chain(sup, trouble, 6, "exit")
        errors = [future.exception(PATIENCE) for future in futures]
        assert isinstance(errors[0], DeviceFault)
        assert {type(error) for error in errors[1:]} == {DependencyFailed}
        assert (cells[-1].numpy() == 0).all()


@pytest.mark.parametrize("completion", ["block", "callback"])
def test_a_child_takes_any_way_of_completion(remote, trouble, completion):
    with remote(completion=completion) as sup:
        futures, cells = chain(sup, trouble, 6)
        assert [future.result(PATIENCE) for future in futures] == cells[1:]


# -- memory that is short ---------------------------------------------------------------------------------------------
def test_a_request_that_is_short_of_memory_once_runs_again_in_the_child(remote, trouble, tmp_path):
    with remote() as sup:
        a, out = sup.device.array(np.full(8, 3, np.float32)), sup.device.zeros(8)
        request = trouble.Trouble("out of memory", a, out, once=str(tmp_path / "short"))
        assert (sup.submit(request).result(PATIENCE).numpy() == 3).all()
        never = sup.submit(trouble.Trouble("out of memory", a, out))
        with pytest.raises(OutOfMemory, match="caches were freed"):
            never.result(PATIENCE)
        assert (sup.stats().done, sup.stats().failed, sup.stats().restarts) == (1, 1, 0)


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self, tensor):
        self.tensor, self.me = tensor, self


@pytest.fixture
def no_collections():
    """None but those that are asked for."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_a_device_that_is_short_of_memory_collects_garbage_and_takes_no_more_than_it_needs(monkeypatch):
    device = make_shared_device("host")
    asked = []
    make = device._make_chunk

    def make_one(nbytes):
        asked.append(nbytes)
        if sum(chunk.nbytes for chunk in device.chunks.values()) + nbytes > 100 * MIB:
            raise OutOfMemory("full")
        return make(nbytes)

    monkeypatch.setattr(device, "_make_chunk", make_one)
    Cycle(device.empty(60 * MIB, "u8"))
    again = device.empty(50 * MIB, "u8")
    assert asked == [64 * MIB, 64 * MIB], "the second was made where the first had been"
    small = device.empty(30 * MIB, "u8")
    assert asked[2:] == [64 * MIB, 30 * MIB]
    with pytest.raises(OutOfMemory, match="full"):
        device.empty(40 * MIB, "u8")
    del again, small
    large = device.empty(90 * MIB, "u8")
    assert (len(device.chunks), large.nbytes) == (1, 90 * MIB), "what was empty, and too small, made room for it"
    device.close()


def test_an_output_that_does_not_fit_fails_its_request_alone(remote, rng, monkeypatch):
    with remote() as sup:
        a = sup.device.array(rng.standard_normal((64, 64)), "f32")
        good = dp.MatmulRequest(a, a)
        sup.submit(good).result(PATIENCE)

        def refuse(nbytes):
            raise OutOfMemory(f"no {nbytes}")

        monkeypatch.setattr(sup.device, "_make_chunk", refuse)
        tall = sup.device.array(np.zeros((16384, 1), np.float32))
        huge = dp.MatmulRequest(tall, tall.T)
        with pytest.raises(OutOfMemory, match=f"no {1 << 30}"):
            sup.submit(huge).result(PATIENCE)
        assert np.allclose(sup.submit(good).result(PATIENCE).numpy(), a.numpy() @ a.numpy(), atol=1e-3)


def plain(sup, trouble, kind="fine", once=""):
    return trouble.Trouble(kind, sup.device.array(np.ones(8, np.float32)), sup.device.zeros(8), once)


def test_a_deadline_ends_what_is_still_queued_behind_one_that_hangs(remote, trouble):
    with remote(streams=1, hang_seconds=0.1) as sup:
        hanging = sup.submit(plain(sup, trouble, "hang"))
        others = [sup.submit(plain(sup, trouble)) for _ in range(sending.MIN_BATCH - 2)]
        late = sup.submit(plain(sup, trouble), timeout=0.2)  # with so many in flight it waits for company
        assert isinstance(late.exception(PATIENCE), DeadlineExceeded)
        ended = hanging.exception(PATIENCE)
        assert isinstance(ended, DeadlineExceeded)
        assert "it has no deadline, but a request that was submitted with timeout= had its deadline" in str(ended)
        assert "hang_seconds=0.1 s" in str(ended)
        assert "give the supervisor a larger hang_seconds" in str(ended)
        assert [future.exception(PATIENCE) for future in others] == [None] * len(others)


def test_a_request_may_go_on_for_hang_seconds_behind_its_deadline_however_long_it_has_run(remote, trouble, tmp_path):
    hold = trouble.Hold(tmp_path)
    with remote(streams=1, hang_seconds=1.0) as sup, hold:
        future = sup.submit(plain(sup, trouble, "held", hold.once), timeout=10 * PATIENCE)
        assert sup._pool._find_hanging(future.deadline + 0.9) is None  # it began long before
        hold.release()
        assert future.exception(PATIENCE) is None
        assert sup.stats().restarts == 0


def test_deadlines_that_are_over_at_once_replace_no_process(remote):
    with remote() as sup:
        a = sup.device.array(np.eye(64, dtype=np.float32))
        request = dp.MatmulRequest(a, a)
        for _ in range(20):
            futures = [sup.submit(request, timeout=0.001) for _ in range(100)]
            assert {type(future.exception(PATIENCE)) for future in futures} <= {type(None), DeadlineExceeded}
        assert sup.stats().restarts == 0
        assert (sup.submit(request).result(PATIENCE).numpy() == np.eye(64)).all()


def test_a_deadline_ends_what_may_not_start_yet(remote, trouble, tmp_path):
    hold = trouble.Hold(tmp_path)
    with remote() as sup, hold:
        first = sup.submit(plain(sup, trouble, "held", hold.once), worker=0)
        second = sup.submit(plain(sup, trouble), worker=1)
        assert second.exception(PATIENCE) is None
        stuck = Future(plain(sup, trouble))  # of another supervisor's, say
        late = sup.submit(plain(sup, trouble), worker=1, after=[stuck], timeout=0.1)
        with pytest.raises(DeadlineExceeded, match="it was not run"):
            late.result(PATIENCE)
        hold.release()
        assert first.exception(PATIENCE) is None
        assert sup.stats().failed == 1


def test_what_is_refused_as_it_is_sent_is_told_of_by_the_warden_who_may_close(remote, trouble, tmp_path):
    told = []

    def close(_):
        told.append(threading.current_thread() is sup._pool._monitor)
        if told[0]:
            sup.close()

    hold = trouble.Hold(tmp_path)
    sup = remote(streams=1)
    with hold:
        futures = [sup.submit(plain(sup, trouble, "held", hold.once)) for _ in range(sending.MIN_BATCH)]
        elsewhere = dp.device("host").zeros(8)
        refused = sup.submit(trouble.Trouble("fine", elsewhere, elsewhere))
        refused.add_done_callback(close)
        futures += sup.submit_many([plain(sup, trouble) for _ in range(sending.MIN_BATCH)])  # enough to be sent, here
        assert isinstance(refused.exception(PATIENCE), BadRequest)
    assert [future.exception(PATIENCE) for future in futures] == [None] * len(futures)
    sup._pool.join(PATIENCE)
    assert told == [True]
    sup.close()


def test_who_sees_a_request_launched_sees_its_number(remote, trouble):
    seen = []

    def look(frame, _event, _argument):
        if frame.f_code.co_name != "_record_sent":
            return None
        future = frame.f_locals["future"]
        seen.append((future.is_launched, hasattr(future, "_number")))
        return look

    with remote(streams=1) as sup:
        request = plain(sup, trouble)
        before = sys.gettrace()
        sys.settrace(look)
        try:
            future = sup.submit(request)
        finally:
            sys.settrace(before)
        future.result(PATIENCE)
    assert len(set(seen)) > 1
    assert (True, False) not in seen


def test_what_is_sent_again_is_what_was_sent_whoever_has_had_the_request_since(remote, trouble, tmp_path):
    hold = trouble.Hold(tmp_path)
    with remote(streams=1) as sup:
        request = plain(sup, trouble, "held", hold.once)
        future = sup.submit(request)
        object.__setattr__(request, "bound", None)
        hold.release_behind(sup._pool._child.process.pid, signal.SIGKILL, PATIENCE)
        assert future.result(PATIENCE) is request.out


@pytest.mark.parametrize(
    ("isolation", "setup"),
    [("process", ("trouble",)), ("process", ("trouble", "gpu_on_host")), ("thread", ())],
    ids=["process", "a GPU's process", "thread"],
)
def test_what_the_worker_comes_to_after_its_deadline_is_not_run(isolation, setup, remote, trouble, tmp_path):
    """Some of them have been sent to the child, ahead of their turn."""
    hold = trouble.Hold(tmp_path)
    with remote(streams=1, isolation=isolation, setup=setup) as sup, hold:
        first = sup.submit(plain(sup, trouble, "held", hold.once))
        requests = [plain(sup, trouble) for _ in range(sending.MIN_IN_FLIGHT + 2)]
        late = [sup.submit(request, timeout=0.5) for request in requests]
        if isolation == "process":
            assert any(future.is_launched for future in late)
        while not late[-1].expired:
            threading.Event().wait(0.01)
        hold.release()
        assert first.exception(PATIENCE) is None
        errors = [future.exception(PATIENCE) for future in late]
        assert {(type(error), str(error)) for error in errors} == {(DeadlineExceeded, TOO_LATE)}
        assert not any(request.out.numpy().any() for request in requests)
        again = plain(sup, trouble)
        assert sup.submit(again, timeout=PATIENCE).result(PATIENCE).numpy().all()
        stats = sup.stats()
        assert (stats.done, stats.failed, stats.restarts) == (2, len(late), 0)


def test_what_waits_for_a_request_that_came_too_late_fails_with_it(remote, trouble, tmp_path):
    hold = trouble.Hold(tmp_path)
    with remote() as sup, hold:
        sup.submit(plain(sup, trouble, "held", hold.once), worker=0)
        late = sup.submit(plain(sup, trouble), worker=0, timeout=0.5)
        after = sup.submit(plain(sup, trouble), worker=1, after=[late])
        while not late.expired:
            threading.Event().wait(0.01)
        hold.release()
        assert isinstance(late.exception(PATIENCE), DeadlineExceeded)
        with pytest.raises(DependencyFailed, match=TOO_LATE):
            after.result(PATIENCE)


def test_what_had_begun_in_time_in_a_child_that_was_lost_runs_again_after_its_deadline(remote, trouble, tmp_path):
    hold = trouble.Hold(tmp_path)
    with remote(streams=1) as sup, hold:
        first = sup.submit(plain(sup, trouble, "held", hold.once))
        dying = plain(sup, trouble, "die once", str(tmp_path / "once"))
        timed = sup.submit(dying, timeout=PATIENCE)
        while not timed.is_launched:
            threading.Event().wait(0.001)
        timed.deadline = 0.0  # over by the time the next child has it; this one was told another
        hold.release()
        assert first.exception(PATIENCE) is None
        assert timed.result(PATIENCE).numpy().all()
        assert sup.stats().restarts == 1
