"""Worlds whose ranks are Ray's actors, on the host: every collective, ranks that are killed or stopped."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, CollectiveError, CollectiveTimeout, RankLost

dray = pytest.importorskip("dispatch.ray")
pytest.importorskip("torch", reason="PyTorch, whose gloo moves data between processes of the host, is not installed")
SIZE = 3


@pytest.fixture(scope="module")
def world(ray):
    assert ray.is_initialized()
    with dray.RayWorld(SIZE, "host", num_cpus=0.5, max_restarts=2, deadline=60) as made:
        yield made


def total(world, n=10):
    x = world.device.array(np.full(n, world.members[world.rank] + 1.0, np.float32))
    return float(dp.all_reduce(x, comm=world).numpy()[-1]), world.size, world.members


def everything(world):
    import collective_cases

    big = np.random.default_rng(1).integers(0, 100, (world.size, 100_001))
    found = dp.all_reduce(world.device.array(big[world.rank]), comm=world).numpy()
    alone, both = world.communicator.split(world.rank), world.communicator.split(0, key=-world.rank)
    parts = [float(dp.all_reduce(world.device.array(np.ones(3)), comm=each).numpy()[0]) for each in (alone, both)]
    world.kept["x"] = world.device.array(np.arange(3.0))
    with dp.collective_group():
        grouped = [dp.all_reduce(world.device.array(np.full(2, float(n))), comm=world) for n in range(3)]
        dp.sendrecv(world.device.array(np.ones(1)), comm=world, dest=world.rank, source=world.rank)
    right = np.array_equal(found, big.sum(0)) and [float(each.numpy()[0]) for each in grouped] == [0.0, 3.0, 6.0]
    return collective_cases.failures(world), collective_cases.COUNT[0], right, parts, (alone.size, both.rank)


def test_every_collective_gives_what_the_reference_gives(world):
    for rank, (failed, count, right, parts, sizes) in enumerate(world.run(everything)):
        assert failed == []
        assert count > 400
        assert right
        assert parts == [1.0, SIZE]
        assert sizes == (1, SIZE - 1 - rank)


def disagreeing(world):
    x = world.device.array(np.ones(4 + (world.rank == 1), np.float32))
    with pytest.raises(CollectiveError, match="ranks disagree: this one calls"):
        dp.all_reduce(x, comm=world)
    world.rebuild(grace=30)
    return total(world)


def test_ranks_that_make_different_calls_all_learn_so_and_go_on(world):
    assert world.run(disagreeing) == [(6.0, SIZE, (0, 1, 2))] * SIZE


def losing(world, victim, way):
    """What the others are told, and how long it took them."""
    total(world)
    world.deadline, world.communicator.deadline = 60.0, 2.0
    if world.rank == victim:
        os.kill(os.getpid(), way)
    begun = time.monotonic()
    try:
        while True:
            total(world)
    except CollectiveError as error:
        return type(error).__name__, getattr(error, "ranks", None), time.monotonic() - begun


def test_a_rank_that_is_killed_is_an_error_on_all_and_comes_back_with_a_new_process(world):
    with pytest.raises(RankLost, match="rank 1") as caught:
        world.run(losing, 1, signal.SIGKILL)
    assert caught.value.ranks == (1,)
    world.rebuild(grace=60)
    assert world.run(total) == [(6.0, SIZE, (0, 1, 2))] * SIZE
    assert world.run(lambda own: own.generation >= 1 and list(own.kept)) == [["x"], [], ["x"]]
    assert world.run(lambda own: own.kept["x"].numpy().tolist() if own.kept else [])[::2] == [[0.0, 1.0, 2.0]] * 2


def stopping(world):
    """Rank 2 is stopped; the others are told by the deadline, and go on without it."""
    pids = dp.all_gather(world.device.array(np.array([os.getpid()])), comm=world).numpy()[:, 0]
    said = losing(world, 2, signal.SIGSTOP)
    try:
        world.rebuild(grace=1)
    except CollectiveError as error:
        return said, type(error).__name__
    found = total(world)
    if world.rank == 0:
        os.kill(int(pids[2]), signal.SIGCONT)
    return said, found


def test_a_rank_that_is_stopped_is_late_and_left_out(world):
    pids = world.run(lambda _: os.getpid())
    waker = threading.Timer(60, os.kill, (pids[2], signal.SIGCONT))  # where the others fail, and do not wake it
    waker.start()
    try:
        first, second, late = world.run(stopping)
    finally:
        waker.cancel()
    for (error, _, took), found in (first, second):
        assert error in ("CollectiveTimeout", "RankLost")
        assert took < 2 + 4  # the deadline, on a machine that has other things to do
        assert found == (3.0, 2, (0, 1))
    assert late[1] == "RankLeftOut"


def test_what_a_world_refuses(ray):
    with pytest.raises(BadRequest, match="name"):
        dp.World.from_ray("", 0, 1)
    with pytest.raises(BadRequest, match="rank"):
        dp.World.from_ray("x", 1, 1)
    with pytest.raises(CollectiveTimeout, match="member 0 of 2"):
        dp.World.from_ray("nobody comes", 0, 2, "host", deadline=0.5)
    ray.kill(ray.get_actor("dispatch world nobody comes"))
