"""The end of a supervisor on the host: closed, with failures that nobody asked for, dropped, exited from or forked."""

import gc
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import Closed, StaleTensor, Undelivered
from dispatch.supervise import pool as pool_module

spec = importlib.util.spec_from_file_location("busy_workers", Path(__file__).with_name("busy_workers.py"))
workers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(workers)
PATIENCE, Hold, defect, refuse = workers.PATIENCE, workers.Hold, workers.defect, workers.refuse


def run_script(script: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *options, "-c", script], capture_output=True, text=True, timeout=600, env=os.environ
    )


# -- the end ------------------------------------------------------------------------------------------------------
def test_leaving_the_block_waits_for_all_work(probe):
    ran = []
    with dp.Supervisor("host", streams=2) as sup:
        futures = sup.submit_many([probe(lambda i=i: ran.append(i)) for i in range(300)])
    assert sorted(ran) == list(range(300))
    assert all(future.done() for future in futures)
    with pytest.raises(Closed, match="its block was left"):
        sup.submit(probe())
    with pytest.raises(Closed, match="create a new one"):
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
    begin, before = pool_module.WorkerPool._start_and_call, set(threading.enumerate())

    def slow(self, then):
        begin(self, then)
        time.sleep(0.3)  # whom it has let go on is faster

    monkeypatch.setattr(pool_module.WorkerPool, "_start_and_call", slow)
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
        "from dispatch.supervise.waiters import ensure_wait_list\n"
        "release = threading.Event()\n"
        "sup.submit(Probe(lambda: (entered.set(), release.wait())), worker=0)\n"
        "queued = sup.submit(Probe(), worker=0)\n"
        "entered.wait()\n"
        "waiting = ensure_wait_list(queued)\n"
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
