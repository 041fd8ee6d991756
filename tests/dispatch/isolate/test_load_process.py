"""Load before a child process: priorities, requests that wait for others, and what is dropped where queues are full."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import DependencyFailed, DeviceFault, QueueFull
from dispatch.isolate import seat

PATIENCE = 60


@pytest.fixture
def remote(trouble):
    made = []

    def make(**options):
        options = {"streams": 2, "setup": (trouble.__name__,), **options}
        made.append(dp.Supervisor("host", isolation="process", **options))
        return made[-1]

    yield make
    for sup in made:
        sup.device.close()


def chain(sup, trouble, length, kind="fine", **options):
    """Requests each of which copies what the one before it made, at every worker in turn."""
    cells = [sup.device.array(np.full(8, value, np.float32)) for value in (7, *[0] * length)]
    futures: list[dp.Future] = []
    for index in range(length):
        request = trouble.Trouble(kind if index == 0 else "fine", cells[index], cells[index + 1])
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


def test_a_queue_before_a_child_has_priorities_and_drops_the_oldest(remote, trouble, monkeypatch):
    monkeypatch.setattr(seat, "WINDOW", 1)
    ended = []
    with remote(streams=1, queue_size=3, when_full="drop_oldest") as sup:
        x = sup.device.zeros(8)
        make = [trouble.Trouble("slow", x, sup.device.zeros(8)) for _ in range(6)]
        running = sup.submit(make[0])
        futures = [
            sup.submit(request, priority=priority) for request, priority in zip(make[1:], (0, 1, 0, -1, 0), strict=True)
        ]
        for index, future in enumerate(futures):
            future.add_done_callback(lambda _, index=index: ended.append(index))
        assert [isinstance(futures[i].exception(0), QueueFull) for i in (0, 1)] == [True, True]
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


def test_a_chain_goes_on_when_its_child_is_killed(remote, trouble):
    with remote(max_restarts=10, max_seconds=600) as sup:
        futures, cells = chain(sup, trouble, 30, "slow")
        os.kill(sup._crew._child.process.pid, signal.SIGKILL)
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
