"""Supervisors and ranks that are Ray's actors, with real Ray on the host: results, errors, limits, killed actors.

One file, so that one Ray is started for all of it.
"""

import asyncio
import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import (
    ActorLost,
    BadRequest,
    Closed,
    CollectiveError,
    CollectiveTimeout,
    DeviceUnavailable,
    NoRow,
    QueueFull,
    RankLost,
    StaleTensor,
)

dray = pytest.importorskip("dispatch.ray")

PATIENCE = 60
SIZE = 3  # ranks


@pytest.fixture(scope="module")
def supervisor(ray):
    assert ray.is_initialized()
    with dray.RaySupervisor("host", num_cpus=0, max_pending=8, streams=2) as made:
        yield made


@pytest.fixture
def numbers(rng):
    return [rng.standard_normal((17, 17)).astype(np.float32) for _ in range(3)]


def test_results_by_value_and_by_reference(supervisor, ray, numbers):
    a, b, _ = numbers
    future = supervisor.submit(dp.MatmulRequest, a=a, b=b)
    expected = a.astype(np.float64) @ b
    assert np.allclose(future.result(PATIENCE), expected, atol=1e-4)
    assert np.allclose(ray.get(future.ref), expected, atol=1e-4), "an ObjectRef for others"
    chained = supervisor.submit(dp.MatmulRequest, a=future, b=ray.put(a)).result(PATIENCE)
    assert np.allclose(chained, expected @ a, atol=1e-3)
    assert future.done()
    assert future.exception(PATIENCE) is None


def test_a_request_over_host_tensors_is_sent_with_all_its_fields(supervisor, numbers):
    host = dp.device("host")
    a, b, bias = (host.array(each) for each in numbers)
    request = dp.MatmulRequest(a=a, b=b.T, bias=host.array(numbers[2][0]), epilogue=dp.Epilogue.BIAS)
    assert np.array_equal(supervisor.submit(request).result(PATIENCE), dp.run(request).numpy())
    assert bias.shape == (17, 17)


def test_tensors_stay_in_the_actor(supervisor, numbers):
    a, b, _ = numbers
    x = supervisor.array(a, timeout=PATIENCE)
    assert (x.shape, x.dtype) == ((17, 17), "f32")
    kept = supervisor.submit(dp.MatmulRequest, a=x, b=b, keep=True)
    y = supervisor.submit(dp.MatmulRequest, a=kept, b=x, keep=True).result(PATIENCE)
    assert isinstance(y, dray.RemoteTensor)
    assert np.allclose(y.fetch(PATIENCE), a.astype(np.float64) @ b @ a, atol=1e-3)
    stale = pickle.loads(pickle.dumps(y._reference))
    assert kept.result(PATIENCE) is kept.result(PATIENCE), "one handle, while the future is there"
    del y
    until = time.monotonic() + PATIENCE
    while True:  # the actor lets go of it, once it has heard
        handle = dray.supervisor._unpickle_handle(stale, x._actor)
        error = supervisor.submit(dp.MatmulRequest, a=handle, b=b).exception(PATIENCE)
        if error is not None or time.monotonic() > until:
            break
    assert isinstance(error, StaleTensor)
    assert "released" in str(error)


def test_errors_come_as_they_were_raised(supervisor, numbers):
    a = numbers[0]
    future = supervisor.submit(dp.MatmulRequest, a=a, b=a[:3])
    with pytest.raises(BadRequest) as caught:
        future.result(PATIENCE)
    assert type(caught.value) is BadRequest
    with pytest.raises(NoRow):
        supervisor.submit(dp.MatmulRequest, a=a, b=a, library="cutlass").result(PATIENCE)
    broken = supervisor.submit(dp.MatmulRequest, a=future, b=a)  # it follows from one that failed
    assert type(broken.exception(PATIENCE)) is BadRequest
    with pytest.raises(BadRequest, match="request class"):
        supervisor.submit(a)
    with pytest.raises(BadRequest, match="in a sequence"):
        supervisor.submit(dp.MatmulRequest, a=[future], b=a)


def test_names_that_nothing_has_are_refused_before_anything_is_sent(supervisor, numbers):
    with pytest.raises(TypeError, match=r"MatmulRequest\(\) got an unexpected .* 'epilog'\. Did you mean epilogue\?"):
        supervisor.submit(dp.MatmulRequest, a=numbers[0], b=numbers[1], epilog="RELU")
    with pytest.raises(TypeError, match=r"Supervisor\(\) got an unexpected .* 'stream'\. Did you mean streams\?"):
        dray.RaySupervisor("host", num_cpus=0, stream=2)
    assert supervisor.pending == 0


def test_a_result_that_nobody_asks_for_is_dropped_also_where_it_is_an_error(supervisor, ray, numbers):
    """A call of the actor that failed for it would be told of on the caller's terminal, though nobody can mend it."""
    a, b, _ = numbers
    for other in (b, b[:3]):  # the second cannot be multiplied
        sent = []
        drop = SimpleNamespace(remote=lambda given, sent=sent: sent.append(supervisor._actor.drop.remote(given)))
        kept = supervisor.submit(dp.MatmulRequest, a=a, b=other, keep=True)
        kept._keeper = SimpleNamespace(_actor=SimpleNamespace(drop=drop))
        del kept
        assert ray.get(sent, timeout=PATIENCE) == [None]


def test_futures_are_awaited(supervisor, numbers):
    a, b, _ = numbers

    async def both():
        return await asyncio.gather(*(supervisor.submit(dp.MatmulRequest, a=a, b=b) for _ in range(2)))

    first, second = asyncio.run(both())
    assert np.array_equal(first, second)


@pytest.mark.usefixtures("ray")
def test_no_more_are_in_flight_than_max_pending():
    made = dray.RaySupervisor("host", num_cpus=0, max_pending=3, when_full="raise", streams=1)
    waiting = dray.RaySupervisor("host", num_cpus=0, max_pending=2, streams=1)
    with made, waiting:
        made.ready(PATIENCE)
        pid = made.ready().pid
        os.kill(pid, signal.SIGSTOP)
        x = np.ones((2, 2), np.float32)
        futures = [made.submit(dp.MatmulRequest, a=x, b=x) for _ in range(3)]
        assert made.pending == 3
        with pytest.raises(QueueFull, match="max_pending=3"):
            made.submit(dp.MatmulRequest, a=x, b=x)
        os.kill(pid, signal.SIGCONT)
        assert all(np.array_equal(each.result(PATIENCE), x @ x) for each in futures)
        assert made.pending == 0
        stopped = waiting.ready(PATIENCE).pid
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(2):
            waiting.submit(dp.MatmulRequest, a=x, b=x)
        with pytest.raises(QueueFull):
            waiting.submit(dp.MatmulRequest, a=x, b=x, timeout=0.2)
        os.kill(stopped, signal.SIGCONT)
        many = [waiting.submit(dp.MatmulRequest, a=x, b=x) for _ in range(50)]  # each waits for room
        assert len(waiting._in_flight) <= 2
        assert all(np.array_equal(each.result(PATIENCE), x @ x) for each in many)


@pytest.mark.usefixtures("ray")
def test_an_actor_that_is_killed_is_started_anew_with_a_new_generation():
    made = dray.RaySupervisor("host", num_cpus=0, max_restarts=1, streams=1)
    x = np.eye(3, dtype=np.float32)
    before = made.ready(PATIENCE)
    kept = made.array(x, timeout=PATIENCE)
    os.kill(before.pid, signal.SIGSTOP)  # so that the request is in flight
    lost = made.submit(dp.MatmulRequest, a=kept, b=x)
    os.kill(before.pid, signal.SIGKILL)
    with pytest.raises(ActorLost):
        lost.result(PATIENCE)
    after = made.ready(PATIENCE)
    assert after.pid != before.pid
    assert (after.actor, after.generation > before.generation) == (before.actor, True)
    with pytest.raises(StaleTensor, match="has ended"):
        kept.fetch(PATIENCE)
    assert isinstance(made.submit(dp.MatmulRequest, a=kept, b=x).exception(PATIENCE), StaleTensor)
    assert np.array_equal(made.submit(dp.MatmulRequest, a=x, b=x).result(PATIENCE), x)
    os.kill(after.pid, signal.SIGKILL)  # for good
    with pytest.raises(ActorLost):
        made.ready(PATIENCE)
    made.close()
    with pytest.raises(Closed):
        made.submit(dp.MatmulRequest, a=x, b=x)


@pytest.mark.usefixtures("ray")
def test_a_pool_is_placed_by_a_placement_group():
    x = np.eye(2, dtype=np.float32)
    with dray.RayPool(2, num_cpus=1, device="host", streams=1) as pool:
        assert len({each.ready(PATIENCE).pid for each in pool.supervisors}) == 2
        kept = pool.supervisors[1].array(x)
        future = pool.submit(dp.MatmulRequest, a=kept, b=x, keep=True)
        assert future.result(PATIENCE)._reference.actor == pool.supervisors[1].ready().actor
        assert np.array_equal(pool.submit(dp.MatmulRequest, a=future, b=x).result(PATIENCE), x), "where it is kept"
        with pytest.raises(DeviceUnavailable, match="has not placed"):
            dray.RayPool(1, num_cpus=64, placing=0.5)


# -- ranks ----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def world(ray):
    assert ray.is_initialized()
    pytest.importorskip("torch", reason="PyTorch, whose gloo moves data between processes of the host, is missing")
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
    with pytest.raises(CollectiveError, match="ranks disagree: this rank calls"):
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


@pytest.mark.usefixtures("ray")
def test_what_a_world_refuses():
    with pytest.raises(BadRequest, match="name"):
        dp.World.from_ray("", 0, 1)
    with pytest.raises(BadRequest, match="rank"):
        dp.World.from_ray("x", 1, 1)


def test_a_world_whose_members_do_not_come_ends_at_its_deadline(ray):
    pytest.importorskip("torch", reason="PyTorch, whose gloo moves data between processes of the host, is missing")
    with pytest.raises(CollectiveTimeout, match="member 0 of 2"):
        dp.World.from_ray("nobody comes", 0, 2, "host", deadline=0.5)
    with suppress(ValueError):  # it has ended with its last handle, or Ray has not made it yet
        ray.kill(ray.get_actor("dispatch world nobody comes"))
