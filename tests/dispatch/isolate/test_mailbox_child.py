"""Mailboxes between a parent and a child: no request is lost or doubled, whoever looks there or does not."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise.process import mailbox, monitor

spec = importlib.util.spec_from_file_location("mailbox_ends", Path(__file__).with_name("mailbox_ends.py"))
mail = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mail)
PATIENCE, AWAY = mail.PATIENCE, mail.AWAY

pytestmark = pytest.mark.skipif(not mailbox.IS_ORDERED, reason="this processor can have no mailbox")


@pytest.fixture
def sup(trouble, monkeypatch):
    monkeypatch.setattr(monitor, "TICK", AWAY)
    with dp.Supervisor("host", streams=1, isolation="process", setup=(trouble.__name__,)) as made:
        yield made
    made.device.close()


def request_of(sup):
    a = sup.device.array(np.eye(4, dtype=np.float32))
    return dp.MatmulRequest(a, a, out=sup.device.zeros((4, 4)))


def told(future):
    """Set once the callbacks of a future are called."""
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event


def test_each_of_many_in_turn_reads_what_the_one_before_has_written_and_runs_once(sup):
    """Were one lost, doubled or out of order, a cell would be another number."""
    device, turns = sup.device, 2000
    one, total, count = (device.array(np.full((1, 1), value, np.float32)) for value in (1, 0, 0))
    add = dp.MatmulRequest(one, one, c=count, out=count)
    add_that = dp.MatmulRequest(count, one, c=total, out=total)
    for _ in range(turns // 2):
        sup.submit(add).result(PATIENCE)
        sup.submit(add_that).result(PATIENCE)
    assert count.numpy() == turns // 2
    assert total.numpy() == sum(range(turns // 2 + 1))


def test_one_by_one_with_pauses_waited_for_in_any_way_all_are_told(sup, rng):
    """The monitor thread looks at nothing of itself: an end that nobody is told of is never found."""
    request, draw = request_of(sup), random.Random(int(rng.integers(1 << 32)))
    for turn in range(3000):
        future = sup.submit(request)
        way = draw.randrange(5)
        if way == 0:
            assert told(future).wait(PATIENCE), turn
        elif way == 1:
            with contextlib.suppress(TimeoutError):
                future.result(draw.uniform(0, 1e-4))
            assert told(future).wait(PATIENCE), turn
        else:
            if way == 2:
                pause(draw.uniform(0, 1e-4))
            future.result(PATIENCE)
        if draw.random() < 0.3:
            pause(draw.choice([1e-5, 3e-5, 1e-4, 1e-3]))


def pause(seconds):
    """Without a sleep, that would take longer."""
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass


def mapped_mailboxes():
    gc.collect()  # those of earlier tests' children
    return sum("memfd:mailboxes" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_child_that_is_killed_at_any_moment_costs_no_future(trouble, rng):
    draw, before_all = random.Random(int(rng.integers(1 << 32))), mapped_mailboxes()
    with dp.Supervisor(
        "host", streams=1, isolation="process", setup=(trouble.__name__,), max_restarts=1000, spare=True
    ) as sup:
        request = request_of(sup)
        for _ in range(8):
            sup.submit(request).result(PATIENCE)
            before = sup.generation
            killer = threading.Timer(draw.uniform(0, 2e-3), os.kill, [sup._pool._child.process.pid, signal.SIGKILL])
            killer.start()
            while sup.generation == before:
                sup.submit(request).result(PATIENCE)
            killer.join()
    sup.device.close()
    assert mapped_mailboxes() == before_all


def cpu_seconds(pid):
    """What a process has used of processors, with the threads that it has."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_child_and_a_parent_that_have_nothing_to_do_use_no_processor(sup):
    request = request_of(sup)
    for _ in range(500):
        sup.submit(request).result(PATIENCE)
    pids = [os.getpid(), sup._pool._child.process.pid]
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(1)
    used = [cpu_seconds(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(used) <= 0.03, used


def test_where_there_is_no_mailbox_all_goes_over_the_connection(monkeypatch):
    monkeypatch.setattr(mailbox, "IS_ORDERED", False)
    with dp.Supervisor("host", streams=2, isolation="process") as sup:
        request = request_of(sup)
        for _ in range(200):
            sup.submit(request).result(PATIENCE)
        assert all(queue.link.mailbox is None for queue in sup._pool.queues)
    sup.device.close()
