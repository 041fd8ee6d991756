"""Ray's actors with GPUs: ranks whose data NCCL moves, one that is killed and comes back, and supervisors.

Needs Ray, which these tests start on this machine.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import ActorLost, CollectiveError, RankLost, StaleTensor

ROOT = Path(__file__).parents[3]
PATIENCE = 120


@pytest.fixture(scope="module")
def dray(gpus):
    before = list(sys.path)
    module = pytest.importorskip("ray", reason="Ray is not installed: pip install 'cudabind[ray]'")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"PYTHONPATH": paths, "NCCL_NVLS_ENABLE": "0"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.init(num_gpus=gpus, include_dashboard=False, configure_logging=False,
                    runtime_env={"env_vars": environment})  # fmt: skip
    import dispatch.ray

    yield dispatch.ray
    module.shutdown()
    sys.path[:] = before  # to which Ray has added its own


@pytest.fixture(scope="module")
def gpus(nccl):
    from cudabind import driver

    assert nccl
    return int(driver.cuDeviceGetCount())


@pytest.fixture
def two_gpus(gpus):
    if gpus < 2:
        pytest.skip("needs two GPUs")
    return gpus


def total(world):
    x = world.device.array(np.full(1000, world.members[world.rank] + 1.0, np.float32))
    return float(dp.all_reduce(x, comm=world).numpy()[-1]), world.size, str(world.device)


def losing(world, victim):
    """What the other is told, and after how long."""
    world.kept["x"] = world.device.array(np.arange(5.0))
    total(world)
    world.communicator.deadline = 5.0
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        while True:
            total(world)
    except CollectiveError as error:
        world.kept["told"] = type(error).__name__, str(error), time.monotonic() - begun
        raise


def told(world):
    kept = world.kept
    return kept.get("told"), kept["x"].numpy().tolist() if "x" in kept else None


@pytest.mark.usefixtures("two_gpus")
def test_ranks_are_actors_with_a_gpu_each_and_a_killed_one_comes_back(dray):
    with dray.RayWorld(2, num_gpus=1, max_restarts=2, deadline=PATIENCE) as ranks:
        assert ranks.run(total) == [(3.0, 2, "cuda:0")] * 2, "each actor sees its own GPU alone"
        for victim in (1, 0):
            with pytest.raises(RankLost):
                ranks.run(losing, victim)
            ranks.rebuild(grace=PATIENCE)
            assert ranks.run(total) == [(3.0, 2, "cuda:0")] * 2
            found = ranks.run(told)
            print(found)
            assert found[1 - victim][0][0] in ("RankLost", "CollectiveTimeout"), found
            assert found[1 - victim][0][2] < 5 + 5, found
            assert found[1 - victim][1] == [0, 1, 2, 3, 4], "memory of the rank that lived"
            assert found[victim] == (None, None)


def fast(world, turns=20):
    """The bus bandwidth of all_reduce over 256 MiB, in GB/s, and where this rank is."""
    x = world.device.array(np.ones(1 << 26, np.float32))
    for _ in range(3):
        dp.all_reduce(x, comm=world, out=x)
    world.device.synchronize()
    begun = time.perf_counter()
    for _ in range(turns):
        dp.all_reduce(x, comm=world, out=x)
    world.device.synchronize()
    return turns * x.nbytes / (time.perf_counter() - begun) / 1e9, str(world.device)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("shown", ["0", "1"])
def test_ranks_that_see_all_gpus_are_on_their_own(dray, shown):
    """What Ray shows of the GPUs may change how NCCL connects them: the bandwidths are printed."""
    environment = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": shown}
    options = {"runtime_env": {"env_vars": environment}}
    with dray.RayWorld(2, num_gpus=1, deadline=PATIENCE, options=options) as ranks:
        assert [found[0] for found in ranks.run(total)] == [3.0, 3.0]
        found = ranks.run(fast)
        print(f"shown all: {shown}: {found}")
        assert sorted(device for _, device in found) == (["cuda:0", "cuda:1"] if shown == "1" else ["cuda:0"] * 2)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_supervisors_are_actors_with_a_gpu_each_or_half_of_one(dray, gpus, isolation, rng):
    a, b = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    with dray.RayPool(2, num_gpus=1 if gpus > 1 else 0.5, isolation=isolation, streams=2) as pool:
        about = [each.ready(PATIENCE) for each in pool.supervisors]
        print(about)
        assert len({each.pid for each in about}) == 2
        one = pool.supervisors[0]
        x = one.array(a, timeout=PATIENCE)
        kept = pool.submit(dp.MatmulRequest, a=x, b=b, keep=True)
        found = one.submit(dp.MatmulRequest, a=kept, b=x).result(PATIENCE)
        right = a.astype(np.float64) @ b @ a
        assert np.abs(found - right).max() < 1e-2 * np.abs(right).max()
        os.kill(about[0].pid, signal.SIGKILL)
        errors = [one.submit(dp.MatmulRequest, a=a, b=b).exception(PATIENCE) for _ in range(3)]
        assert all(each is None or isinstance(each, ActorLost) for each in errors), errors
        assert one.ready(PATIENCE).generation > about[0].generation
        with pytest.raises(StaleTensor):
            x.fetch(PATIENCE)
        assert np.allclose(one.submit(dp.MatmulRequest, a=a, b=b).result(PATIENCE), a @ b, atol=0.1)
