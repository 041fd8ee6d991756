"""Generations of child processes and their endings: what is told, kept, and left behind."""

from __future__ import annotations

import concurrent.futures
import gc
import importlib.util
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from dispatch.errors import (
    Closed,
    DeviceFault,
    StaleTensor,
    Undelivered,
)
from dispatch.supervise.process import shared_device as memory
from dispatch.supervise.process.child_process import Standby

spec = importlib.util.spec_from_file_location("process_supervisors", Path(__file__).with_name("process_supervisors.py"))
supervisors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(supervisors)
ROOT, PATIENCE, open_supervisor = supervisors.ROOT, supervisors.PATIENCE, supervisors.open_supervisor
hold, child_of, pair, close = supervisors.hold, supervisors.child_of, supervisors.pair, supervisors.close
trouble_of = supervisors.trouble_of


def test_observers_hear_of_every_new_generation(open_supervisor, trouble, tmp_path):
    heard = []
    with open_supervisor(max_restarts=10, max_seconds=600) as sup:
        sup.watch_generation(heard.append)
        for _ in range(2):
            hold = trouble.Hold(tmp_path)
            held = sup.submit(trouble_of(sup, "held", once=hold.once))
            hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
            held.result(PATIENCE)
        assert heard == [2, 3]


def test_failures_that_nobody_asked_for_are_raised_at_the_end(open_supervisor):
    with pytest.raises(Undelivered, match=r"trouble\(exit\)"), open_supervisor(max_restarts=10) as sup:
        sup.submit(trouble_of(sup, "exit"))


def test_closing_without_waiting_cancels_what_was_not_sent(open_supervisor, rng, hold):
    sup = open_supervisor(streams=1)
    request, _ = pair(sup.device, rng)
    futures = [sup.submit(trouble_of(sup, "held", once=hold.once)), *sup.submit_many([request] * 1000)]
    with hold:
        sup.close(wait=False)
    done, left = concurrent.futures.wait(futures, PATIENCE)
    assert not left
    assert any(future.cancelled() for future in done)
    with pytest.raises(Closed):
        sup.submit(request)


def test_results_stay_when_the_supervisor_is_closed_until_the_device_is(open_supervisor, rng):
    with open_supervisor() as sup:
        request, right = pair(sup.device, rng)
        out = sup.submit(request).result(PATIENCE)
    assert close(out, right)
    sup.device.close()
    with pytest.raises(StaleTensor):
        out.numpy()


def test_nothing_is_left_behind(open_supervisor, rng, trouble, tmp_path):
    gc.collect()
    before = (set(os.listdir("/proc/self/fd")), set(threading.enumerate()))
    for spare in (False, True):
        with open_supervisor(spare=spare) as sup:
            request, _ = pair(sup.device, rng)
            hold = trouble.Hold(tmp_path)
            held = sup.submit(trouble_of(sup, "held", once=hold.once))
            hold.release_behind(child_of(sup), signal.SIGKILL, PATIENCE)
            held.result(PATIENCE)
            sup.submit(request).result(PATIENCE)
            pids = [child.process.pid for child in sup._pool._children()]
        sup.device.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert len(os.listdir("/proc/self/fd")) <= len(before[0])
    assert not set(threading.enumerate()) - before[1]


def mapped(pid):
    """Bytes of the shared memory that a process maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if "memfd:dispatch" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


@pytest.mark.parametrize("spare", [False, True])
def test_memory_that_no_tensor_uses_is_given_back_by_parent_and_children(open_supervisor, rng, spare, monkeypatch):
    monkeypatch.setattr(memory, "UNMAP_SECONDS", PATIENCE)  # they are looked at once they all have let go
    gc.collect()  # memory of earlier tests' devices is mapped until then
    with open_supervisor(streams=1, spare=spare) as sup:
        request, right = pair(sup.device, rng)
        sup.submit(request).result(PATIENCE)
        pids = [os.getpid(), child_of(sup)]
        kept = [mapped(pid) for pid in pids]
        assert all(kept)
        big = sup.device.array(np.ones((1 << 25,), np.float32))
        sup.submit(sys.modules["trouble"].Trouble("fine", big, sup.device.empty(big.shape))).result(PATIENCE)
        assert all(mapped(pid) >= before + 2 * big.nbytes for pid, before in zip(pids, kept, strict=True))
        del big
        sup.device.trim()
        assert [mapped(pid) for pid in pids] == kept
        assert close(sup.submit(request).result(PATIENCE), right)
        os.kill(child_of(sup), signal.SIGKILL)  # the next child has never had what was given back
        assert close(sup.submit(request).result(PATIENCE), right)
        assert mapped(child_of(sup)) == kept[1]


def test_memory_made_while_the_child_is_replaced_reaches_the_next_one(open_supervisor, monkeypatch):
    with open_supervisor(streams=1) as sup:
        made = []
        take = Standby.take

        def take_and_grow(self):
            child = take(self)
            made.append(sup.device.array(np.full(1 << 24, 2.0, np.float32)))
            return child

        monkeypatch.setattr(Standby, "take", take_and_grow)
        assert isinstance(sup.submit(trouble_of(sup, "die")).exception(PATIENCE), DeviceFault)
        out = sup.device.empty(made[-1].shape)
        sup.submit(sys.modules["trouble"].Trouble("fine", made[-1], out)).result(PATIENCE)
        assert out.numpy().all()


def test_ends_of_a_child_before_that_a_forked_process_holds_are_passed_over(open_supervisor, monkeypatch):
    """Closed here, and open in a copy, they stay among what is listened to, and tell that nobody is there."""
    with open_supervisor(streams=1) as sup:
        request = trouble_of(sup, "fine")
        sup.submit(request).result(PATIENCE)
        link = sup._pool._child.links[0].socket
        copy = os.dup(link.fileno())
        os.kill(child_of(sup), signal.SIGKILL)
        sup.submit(request).result(PATIENCE)
        stale, other = os.pipe()
        os.close(other)
        looked, patience = threading.Semaphore(0), sup._pool._poll_timeout
        monkeypatch.setattr(sup._pool, "_poll_timeout", lambda: looked.release() or patience())
        sup._pool.poll.register(stale, select.EPOLLIN)  # told of at once, and again and again
        for _ in range(5):
            assert looked.acquire(timeout=PATIENCE)
        sup.submit(request).result(PATIENCE)
        assert sup.generation == 2
        sup._pool.poll.unregister(stale)
        os.close(stale)
        os.close(copy)


PARENT = """
import os, signal, sys, time
import dispatch as dp, trouble
sup = dp.Supervisor("host", streams=1, isolation="process", setup=("trouble",), spare=True)
dev = sup.device
sup.submit(trouble.Trouble(sys.argv[1], dev.zeros(8), dev.zeros(8)))
print(*(child.process.pid for child in sup._pool._children()), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("busy_with", ["fine", "hang", "stop"])
@pytest.mark.usefixtures("trouble")
def test_a_parent_that_dies_leaves_no_child(busy_with):
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    done = subprocess.run(
        [sys.executable, "-c", PARENT, busy_with],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in done.stdout.split():
        gone(int(pid))


def gone(pid):
    """Wait until a process that is not ours has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], PATIENCE)[0], f"process {pid} is still there"
    finally:
        os.close(handle)


FORK = """
import os
import numpy as np
import dispatch as dp
with dp.Supervisor("host", streams=1, isolation="process") as sup:
    a = sup.device.array(np.eye(4, dtype=np.float32))
    pid = os.fork()
    if pid == 0:
        try:
            sup.submit(dp.MatmulRequest(a, a))
        except dp.errors.Closed as error:
            os._exit(7 if "spawn" in str(error) else 1)
        os._exit(2)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(np.array_equal(sup.submit(dp.MatmulRequest(a, a)).result(120).numpy(), np.eye(4)))
"""


def test_a_fork_of_the_parent_is_refused_and_harms_nobody():
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["7", "True"], done.stderr
