"""Memory that a child maps: a child that does not read, or cannot map it, stops nobody."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.device.block_allocator import GROWTH
from dispatch.errors import WorkerFailed
from dispatch.supervise.process import shared_device as memory

spec = importlib.util.spec_from_file_location("mapped_memory", Path(__file__).with_name("mapped_memory.py"))
mapped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mapped)
ROOT, PATIENCE, LARGE, run = mapped.ROOT, mapped.PATIENCE, mapped.LARGE, mapped.run


@contextmanager
def many_descriptors(count):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        pytest.skip(f"this user may have {hard} descriptors, not {count}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def finish(thread):
    """Wait for a thread that must not wait for others."""
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("who", ["present", "standing by", "both"])
def test_a_stopped_child_stops_no_allocation(who):
    count = 2000
    with many_descriptors(count + 500), dp.Supervisor("host", isolation="process", streams=2) as sup:
        device, pool = sup.device, sup._pool
        first = device.array(np.full((4, 4), 2, np.float32))
        right = sup.submit(dp.MatmulRequest(first, first)).result(PATIENCE).numpy()
        while not pool.standby.children:
            threading.Event().wait(0.01)
        stopped = {"present": [pool._child], "standing by": pool.standby.children, "both": pool._children()}[who]
        for child in list(stopped):
            os.kill(child.process.pid, signal.SIGSTOP)
        tensors = []

        def allocate():
            tensors.extend(device.empty((LARGE,), "u8") for _ in range(count))

        thread = threading.Thread(target=allocate, daemon=True)
        thread.start()
        finish(thread)
        assert len(device.chunks) == count + 1
        assert sup.stats().restarts == 0
        for child in list(stopped):
            os.kill(child.process.pid, signal.SIGCONT)
        for tensor in (tensors[0], tensors[-1], tensors[count // 2]):
            last = dp.Tensor(tensor.storage, tensor.ptr, first.layout)
            last.copy_from(np.full((4, 4), 2, np.float32))
            assert (sup.submit(dp.MatmulRequest(last, last)).result(PATIENCE).numpy() == right).all()
        assert (sup.stats().restarts, sup.generation) == (0, 1)
        assert pool._child._attached == set(device.chunks)
        tensors.clear()
        tensor = last = None
        device.trim()
        assert len(device.chunks) == 1
        assert (sup.submit(dp.MatmulRequest(first, first)).result(PATIENCE).numpy() == right).all()
    device.close()


def test_a_stopped_child_that_has_work_is_replaced_by_one_that_has_all_memory():
    count = 700
    with many_descriptors(count + 500), dp.Supervisor("host", isolation="process", streams=1) as sup:
        device = sup.device
        first = device.array(np.full((4, 4), 2, np.float32))
        os.kill(sup._pool._child.process.pid, signal.SIGSTOP)
        tensors = [device.empty((LARGE,), "u8") for _ in range(count)]
        last = dp.Tensor(tensors[-1].storage, tensors[-1].ptr, first.layout)
        last.copy_from(np.eye(4, dtype=np.float32))
        assert (sup.submit(dp.MatmulRequest(first, last)).result(PATIENCE).numpy() == 2).all()
        assert (sup.stats().restarts, sup.generation) == (1, 2)
    device.close()


def test_a_stopped_child_delays_what_is_given_back_by_no_more_than_it_is_given(monkeypatch):
    monkeypatch.setattr(memory, "UNMAP_SECONDS", 0.05)
    with dp.Supervisor("host", isolation="process", streams=1) as sup:
        device = sup.device
        first = device.array(np.full((4, 4), 2, np.float32))
        pid = sup._pool._child.process.pid
        os.kill(pid, signal.SIGSTOP)
        for _ in range(500):
            tensor = device.empty((LARGE,), "u8")
            tensor = None
            if len(device.chunks) > 20:
                device.trim()
            monkeypatch.setattr(memory, "UNMAP_SECONDS", 0.001)
        os.kill(pid, signal.SIGCONT)
        assert (sup.submit(dp.MatmulRequest(first, first)).result(PATIENCE).numpy() == 16).all()
        assert sup.generation == 1
    assert tensor is None
    device.close()


ABOVE = """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
"""
AFTER = """
import numpy as np, dispatch as dp
with dp.Supervisor("host", isolation="process", streams=3, setup=("many",) * {in_child}, spare=1) as sup:
    a = sup.device.array(np.full((8, 8), 0.5, np.float32))
    before = ()
    for turn in range(60):
        before = [sup.submit(dp.MatmulRequest(a, a), after=before, worker=turn % 3)]
    assert (before[0].result(120).numpy() == 2).all()
    assert sup.stats().restarts == 0 and sup.stats().failed == 0
    if {in_child}:
        highest = max(map(int, __import__("os").listdir(f"/proc/{{sup._pool._child.process.pid}}/fd")))
        assert highest > 1100, highest
print("fine")
"""


@pytest.mark.parametrize("where", ["parent", "child"])
def test_descriptors_above_1023_are_like_others(where, tmp_path):
    (tmp_path / "many.py").write_text(ABOVE)
    with many_descriptors(2048):
        program = (ABOVE if where == "parent" else "") + AFTER.format(in_child=int(where == "child"))
        assert run(program, PYTHONPATH=f"{ROOT}:{tmp_path}") == "fine\n"


KEEPS = """
import numpy as np, trouble
kept = []
run = trouble.HostTrouble.run
def keeping(self, request, outputs):
    kept.extend((np.asarray(request.a), np.from_dlpack(request.out)))
    run(self, request, outputs)
    np.asarray(request.out)[0] = sum(int(view[-1]) for view in kept)
trouble.HostTrouble.run = keeping
"""


def test_views_that_code_in_the_child_keeps_hold_the_memory_there(trouble, tmp_path, monkeypatch):
    (tmp_path / "keeps.py").write_text(KEEPS)
    monkeypatch.syspath_prepend(tmp_path)
    with dp.Supervisor("host", isolation="process", streams=1, setup=("trouble", "keeps"), max_restarts=0) as sup:
        device = sup.device
        for turn in range(1, 4):
            a, out = (device.array(np.ones(GROWTH // 4, np.float32)) for _ in range(2))
            request = trouble.Trouble("fine", a, out)
            assert sup.submit(request).result(PATIENCE).numpy()[0] == 2 * turn
            request = a = out = None
            device.trim()
            assert len(device.chunks) == 0
        assert sup.generation == 1
    device.close()


NO_ROOM = """
import resource
if {limit!r} == "files":
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, __import__("os").listdir("/proc/self/fd"))) + 12,) * 2)
else:
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (300 << 20),) * 2)
"""


@pytest.mark.parametrize("limit", ["files", "memory"])
def test_a_child_that_cannot_take_what_it_is_given_says_so(limit, tmp_path, monkeypatch):
    (tmp_path / "no_room.py").write_text(NO_ROOM.format(limit=limit))
    monkeypatch.syspath_prepend(tmp_path)
    sup = dp.Supervisor("host", isolation="process", streams=1, setup=("no_room",), max_restarts=0)
    device = sup.device
    a = device.array(np.eye(4, dtype=np.float32))
    assert (sup.submit(dp.MatmulRequest(a, a)).result(PATIENCE).numpy() == np.eye(4)).all()
    big = [device.empty((LARGE,), "u8") for _ in range(8)]
    last = dp.Tensor(big[-1].storage, big[-1].ptr, a.layout)
    last.copy_from(np.eye(4, dtype=np.float32))
    if limit == "files":  # it closes what it has mapped, so it has room for all
        assert (sup.submit(dp.MatmulRequest(a, last)).result(PATIENCE).numpy() == np.eye(4)).all()
    else:
        try:
            error = sup.submit(dp.MatmulRequest(a, last)).exception(PATIENCE)
        except WorkerFailed as refusal:  # the child was lost, and noticed, before that
            error = refusal
        assert isinstance(error, (WorkerFailed, dp.errors.DeviceFault)), error
        assert "a child process cannot map 65 MiB" in f"{error} {error.__cause__}"
    sup.close(wait=False)
    device.close()
