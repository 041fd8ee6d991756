"""The building blocks of parallel programs over two GPUs: each against one device in float64, and what overlaps."""

from __future__ import annotations

import importlib.util
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch import parallel
from dispatch.errors import Refused

HERE = Path(__file__).parent
CASES = HERE.parents[1] / "dispatch" / "parallel" / "parallel_cases.py"


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parallel_cases():
    return loaded(CASES)


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_every_block_over_one_gpu(dtype, parallel_cases):
    with dp.World.local(["cuda:0"], deadline=120) as world:
        assert world.run(parallel_cases.failures, dtype, 3, 8) == [[]]


@pytest.mark.parametrize("part", ["products", "buckets", "experts", "attention", "stages"])
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_a_block_over_two_gpus_gives_what_one_device_gives(two, dtype, part, parallel_cases):
    """Extents of a multiple of 8, which 16-bit rows of every library take."""
    with dp.World.local(two, deadline=120) as world:
        for seed in range(3):
            assert world.run(getattr(parallel_cases, part), dtype, seed, 8) == [[], []], f"seed {seed}"


def test_threads_of_one_process_have_nccl_move_their_data(two, parallel_cases, monkeypatch):
    """Copies between the GPUs of one process take the locks of both contexts: see test_processes.py for these."""
    from dispatch.parallel import shards

    def run(world):
        with pytest.raises(Refused, match="one process each"):
            parallel.matmul_all_reduce(*[world.device.zeros((8, 8))] * 2, comm=world, by="copies")
        return parallel_cases.products(world, "f32", 5, 8)

    monkeypatch.setattr(shards, "MEASURE_COPIES", True)
    with dp.World.local(two, deadline=120) as world:
        assert world.run(run) == [[], []]


def test_a_measured_number_of_chunks_is_the_same_on_both_and_kept(two):
    from dispatch.parallel import chunks

    def run(world):
        a, b = (world.device.zeros((2048, 2048), "bf16") for _ in range(2))
        parallel.matmul_all_reduce(a, b, comm=world)
        begun = time.monotonic()
        for _ in range(10):
            parallel.matmul_all_reduce(a, b, comm=world)
        world.device.synchronize()
        return [*chunks._measured[world.communicator].values()], time.monotonic() - begun

    with dp.World.local(two, deadline=120) as world:
        (one, took), (other, _) = world.run(run)
    print(f"chunks: {one}, ten calls in {took:.4f} s")
    assert one == other
    assert len(one) == 1


@pytest.mark.usefixtures("nccl")
def test_collectives_run_on_a_stream_of_high_priority():
    from cudabind import driver
    from dispatch.parallel.side_stream import SideStream

    def run(world):
        with world.device.context:
            return [
                int(driver.cuStreamGetPriority(s.handle)) for s in (SideStream(world).stream, world.device.stream())
            ]

    with dp.World.local(["cuda:0"], deadline=60) as world:
        ((first, other),) = world.run(run)
    assert first < other == 0


def test_a_long_ring_has_two_blocks_beside_its_own(two):
    """Memory that the device hands out does not grow by more, of some hundred MiB of K and V."""

    def run(world):
        device = world.device
        q = device.zeros((1, 8, 4096, 128), "bf16")
        k, v = (device.zeros((1, 8, 4096, 128), "bf16") for _ in range(2))
        for _ in range(3):
            parallel.ring_attention(q, k, v, comm=world, causal=True)
        device.synchronize()
        before = device.bytes_in_use()
        for _ in range(10):
            parallel.ring_attention(q, k, v, comm=world, causal=True)
        device.synchronize()
        after = device.bytes_in_use()
        return before, after

    with dp.World.local(two, deadline=120) as world:
        for before, after in world.run(run):
            print(before, after)
            assert before is None or after <= before + (64 << 20)


def test_a_callers_graph_holds_a_sharded_product(two):
    import ctypes

    from cudabind import driver

    meet = threading.Barrier(2)

    def run(world):
        rng, comm = np.random.default_rng(0), world.communicator
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 32), (32, 48)))
        mine = slice(16 * world.rank, 16 * world.rank + 16)
        x, w = world.device.array(a[:, mine].copy()), world.device.array(b[mine])
        parallel.matmul_all_reduce(x, w, comm=comm, chunks=2)
        world.device.synchronize()
        stream, graph = world.device.stream(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.handle)
        meet.wait(60)
        with world.device.context:
            assert driver.cuStreamBeginCapture.unchecked(handle, 1) == 0
            with stream:
                out = parallel.matmul_all_reduce(x, w, comm=comm, chunks=2)
            assert driver.cuStreamEndCapture.unchecked(handle, ctypes.byref(graph)) == 0
            executable = driver.cuGraphInstantiate(graph.value, 0)
            for _ in range(2):
                driver.cuGraphLaunch(executable, stream.handle)
                comm.watch(stream)
        stream.synchronize()
        found = out.numpy()
        meet.wait(60)
        return float(np.abs(found - a @ b).max())

    with dp.World.local(two, deadline=60) as world:
        assert max(world.run(run)) < 1e-3
