"""Children that are lost while a supervisor ends, while they start, and too often: every future ends, memory stays."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import DeadlineExceeded, DeviceFault, DispatchError, WorkerFailed
from dispatch.supervise.queue import CLOSING

PATIENCE = 120  # seconds, on a machine that has other things to do


def child_of(sup):
    return sup._pool._child.process


def trouble_of(sup, kind, **fields):
    a = sup.device.array(np.ones(8, np.float32))
    return sys.modules["trouble"].Trouble(kind, a, sup.device.zeros(8), **fields)


def wait_for(condition):
    ends = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.fixture
def supervisor(trouble):
    made = []

    def make(*setup, **options):
        options = {"streams": 1, "max_restarts": 3, "max_seconds": 1000, **options}
        made.append(dp.Supervisor("host", isolation="process", setup=(trouble.__name__, *setup), **options))
        return made[-1]

    yield make
    for sup in made:
        sup._pool.end(3, WorkerFailed("the test is over"))
        with suppress(DispatchError):  # which the test has heard of
            sup.close()
        sup.device.close()
    assert not [thread for thread in threading.enumerate() if "monitor thread" in thread.name]


# -- while it ends ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP", "deadline"])
def test_a_child_that_is_lost_after_close_without_waiting_ends_every_future(supervisor, what):
    sup = supervisor()
    futures = [sup.submit(trouble_of(sup, "hang"), timeout=PATIENCE if what == "deadline" else None)]
    futures += [sup.submit(trouble_of(sup, "fine")) for _ in range(3)]
    wait_for(lambda: len(sup._pool.queues[0].sent) == 4)
    process = child_of(sup)
    sup.close(wait=False)
    if what == "deadline":
        futures[0].deadline = 0.0  # it is over only now, however long all that took
        sup._pool.watch_deadline(futures[0], sup._pool.queues[0])
    else:
        process.send_signal(getattr(signal, what))
    errors = [future.exception(PATIENCE) for future in futures]
    first = DeadlineExceeded if what == "deadline" else DeviceFault
    assert isinstance(errors[0], first)
    assert all(isinstance(error, DeviceFault) and "was closing" in str(error) for error in errors[1:])
    sup._pool.join(PATIENCE)
    assert not sup._pool._monitor.is_alive()
    assert process.poll() is not None


def test_nothing_is_lost_where_a_supervisor_is_closed_again_and_again_while_its_child_dies(supervisor, tmp_path):
    sup = supervisor(streams=2)
    hold = sys.modules["trouble"].Hold(tmp_path)
    futures = [sup.submit(trouble_of(sup, "held", once=hold.once)) for _ in range(6)]
    sup.close(wait=False)
    hold.release_behind(child_of(sup).pid, signal.SIGKILL, PATIENCE)
    sup.close(wait=False)
    with pytest.raises(DispatchError):
        sup.close()
    assert all(future.done() for future in futures)


# -- while it starts --------------------------------------------------------------------------------------------------
DYING = """
import os, pathlib
left = pathlib.Path({file!r})
count = int(left.read_text())
left.write_text(str(max(count - 1, 0)))
if count:
    {how}
"""
HOW = {"killed": "os.kill(os.getpid(), 9)", "exits": "os._exit(3)", "raises": "raise ImportError('not here')"}


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """`dying(how)`: a module that ends the next children that import it; returns its name and how many are left."""
    monkeypatch.syspath_prepend(tmp_path)
    left = tmp_path / "left"
    left.write_text("0")

    def make(how):
        (tmp_path / f"dies_{how}.py").write_text(DYING.format(file=str(left), how=HOW[how]))
        return f"dies_{how}", left

    return make


@pytest.mark.parametrize("how", HOW)
def test_starting_is_a_restart_like_another(supervisor, dying, how):
    name, left = dying(how)
    sup = supervisor(name, max_restarts=10)
    x = sup.device.array(np.arange(16, dtype=np.float32).reshape(4, 4))
    request = dp.MatmulRequest(x, sup.device.array(np.eye(4, dtype=np.float32)))
    wait_for(lambda: sup._pool.standby.children)  # one that stands by, which the next is taken from
    for child in sup._pool._children():
        child.process.kill()
    left.write_text("3")
    assert (sup.submit(request).result(PATIENCE).numpy() == x.numpy()).all()
    assert left.read_text() == "0"
    assert sup.stats().restarts >= 4
    sup.close()


def test_a_child_that_is_killed_while_the_supervisor_is_made_is_tried_again(supervisor, dying):
    name, left = dying("killed")
    left.write_text("2")
    with supervisor(name) as sup:
        assert sup.submit(trouble_of(sup, "fine")).exception(PATIENCE) is None


@pytest.mark.parametrize("how", HOW)
def test_children_that_never_start_open_the_circuit(supervisor, dying, how):
    name, left = dying(how)
    left.write_text("1000")
    with pytest.raises(WorkerFailed, match="before it was ready"):
        supervisor(name, max_restarts=2)
    tried = 1000 - int(left.read_text())
    assert tried == (3 if how == "killed" else 1)  # one that fails by itself would fail again


def test_a_circuit_opens_when_children_die_at_every_start_and_says_why(supervisor, dying):
    name, left = dying("exits")
    sup = supervisor(name, max_restarts=2)
    left.write_text("1000")
    future = sup.submit(trouble_of(sup, "die"))
    with pytest.raises(WorkerFailed, match=r"max_restarts=2.*ended with status 3"):
        future.result(PATIENCE)
    with pytest.raises(WorkerFailed, match="create a new supervisor"):
        sup.submit(trouble_of(sup, "fine"))


# -- half-open --------------------------------------------------------------------------------------------------------
def test_an_open_circuit_half_opens_on_the_same_memory(supervisor):
    sup = supervisor(max_restarts=1, cooldown=0.3)
    keep = sup.device.array(np.arange(8, dtype=np.float32))
    generations: list[int] = []
    sup.watch_generation(generations.append)
    for _ in range(2):
        error = None
        while "cooldown=0.3" not in str(error):
            try:
                error = sup.submit(trouble_of(sup, "die")).exception(PATIENCE)
            except WorkerFailed as refusal:  # noqa: PERF203
                error = refusal
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                out = sup.submit(sys.modules["trouble"].Trouble("fine", keep, sup.device.zeros(8))).result(PATIENCE)
                break
            except WorkerFailed:
                assert time.monotonic() < ends
                time.sleep(0.02)
        assert out.numpy().tolist() == keep.numpy().tolist() == list(range(8))
    assert generations == sorted(set(generations))
    sup.close()


def test_a_child_that_cannot_start_after_the_cooldown_leaves_the_circuit_open_for_another(supervisor, dying):
    name, left = dying("killed")
    sup = supervisor(name, max_restarts=0, cooldown=0.1)
    left.write_text("3")
    assert isinstance(sup.submit(trouble_of(sup, "die")).exception(PATIENCE), DispatchError)
    ends = time.monotonic() + PATIENCE
    while True:
        try:
            assert sup.submit(trouble_of(sup, "fine")).exception(PATIENCE) is None
            break
        except WorkerFailed:
            assert time.monotonic() < ends
            time.sleep(0.02)
    assert left.read_text() == "0"
    sup.close()


def test_a_supervisor_is_closed_while_its_circuit_rests(supervisor):
    sup = supervisor(max_restarts=0, cooldown=1e6)
    sup.submit(trouble_of(sup, "die")).exception(PATIENCE)
    wait_for(lambda: sup._pool.cooling_down)
    sup.close()
    assert not sup._pool._monitor.is_alive()


def test_a_child_that_is_lost_once_too_often_while_its_supervisor_ends_fails_what_is_left(supervisor, tmp_path):
    sup = supervisor(max_restarts=0, cooldown=1e6)
    hold = sys.modules["trouble"].Hold(tmp_path)
    futures = [sup.submit(trouble_of(sup, "held", once=hold.once)), sup.submit(trouble_of(sup, "fine"))]
    closing = threading.Thread(target=sup._pool.finish)
    closing.start()
    wait_for(lambda: sup._pool.state)
    hold.release_behind(child_of(sup).pid, signal.SIGKILL, PATIENCE)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    for future in futures:
        with pytest.raises(WorkerFailed, match="max_restarts=0"):
            future.result(0)
    sup.close()


def test_no_cooldown_is_too_long(supervisor):
    sup = supervisor(max_restarts=0, cooldown=1e9)
    error = sup.submit(trouble_of(sup, "die")).exception(PATIENCE)
    with pytest.raises(WorkerFailed, match=r"cooldown=1e\+09"):
        raise error
    wait_for(lambda: sup._pool._child is None or sup._pool.state)
    sup.close()
    assert sup._pool.state == CLOSING, "the monitor thread went on to the end"


# -- interrupts that the system itself brings --------------------------------------------------------------------------
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.usefixtures("trouble")
def test_a_main_thread_that_is_interrupted_all_the_time_loses_nothing(isolation):
    """Signals in the midst of what blocks: sockets, locks and polls, which no step of the interpreter shows."""
    in_destructor = importlib.import_module("remains").in_destructor
    with dp.Supervisor("host", isolation=isolation, streams=2) as sup:
        x = sup.device.array(np.eye(8, dtype=np.float32))
        request = dp.MatmulRequest(x, x)
        over, exposed, got, interrupts = threading.Event(), [False], [], 0

        def on_interrupt(_, frame):
            if exposed[0] and not in_destructor(frame):
                exposed[0] = False
                raise KeyboardInterrupt

        def interrupt():
            rng = np.random.default_rng(5)
            while not over.wait(float(rng.random()) * 2e-3):
                os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGINT, on_interrupt)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            while interrupts < 200:
                try:
                    exposed[0] = True
                    got.append(sup.submit(request))
                    got[-1].result(PATIENCE)
                    got += sup.submit_many([request] * 5)
                    got[-1].result(PATIENCE)
                except KeyboardInterrupt:
                    interrupts += 1
                exposed[0] = False
        finally:
            over.set()
            thread.join()
            signal.signal(signal.SIGINT, before)
        assert all(future.exception(PATIENCE) is None for future in got if not future.cancelled())
        assert (sup.submit(request).result(PATIENCE).numpy() == x.numpy()).all()
    if isolation == "process":
        sup.device.close()
