"""What each process of the tests over two GPUs does: `python gpu_ranks.py NAME …`, a function of this file.

Started with torchrun's variables. A rank prints one line of JSON.
"""

import ctypes
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
import dispatch as dp
from cudabind import driver
from dispatch.errors import CollectiveError, DispatchError
from dispatch.libraries.nvrtc.kernel import loaded

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch" / "world"))
import collective_cases

DEADLINE = 3.0


def tell(**facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def summed(world, n=100_000):
    member = world.members[world.rank]
    x = world.device.array(np.full(n, 1.0 + member, np.float32))
    found = dp.all_reduce(x, comm=world).numpy()
    return bool((found == sum(1.0 + each for each in world.members)).all())


def collectives(_):
    with dp.World.from_env(deadline=60) as world:
        tell(rank=world.rank, failed=collective_cases.failures(world), count=collective_cases.COUNT[0])


def captured(_):
    """Graphs of collectives over tensors of ours, and over torch's on its current stream."""
    import captured_cases
    import torch

    with dp.World.from_env(deadline=60) as world:
        failed, right = captured_cases.failures(world), captured_cases.many(world)
        torch.cuda.set_device(world.rank)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                x = torch.empty(5000, device="cuda")
                call = dp.prepare(dp.AllReduceRequest(x, comm=world.communicator, out=x), graph=True)
                for turn in range(20):
                    x.fill_(world.rank + turn)
                    call()
                    right.append(bool((x == 2 * turn + 1).all()))
        tell(rank=world.rank, failed=failed, right=right)


def blocks(_):
    """Every block between two processes, by either way; and those by copies between their GPUs, of changing shapes."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch" / "parallel"))
    import blocks_by_copies
    import parallel_cases

    from dispatch.parallel import shards

    with dp.World.from_env(deadline=60) as world:
        failed = [each for dtype in ("f32", "bf16") for each in parallel_cases.failures(world, dtype, 3, 8)]
        shards.MEASURE_COPIES = not shards.MEASURE_COPIES
        for dtype in ("f64", "f32", "f16", "bf16"):
            failed += parallel_cases.products(world, dtype, 5, 8)
        comm = world.communicator

        def meet():
            dp.barrier(comm=comm)
            world.device.synchronize()

        graphs = {name: blocks_by_copies.graphs(comm, name, meet) for name in blocks_by_copies.BLOCKS}
        wrong = blocks_by_copies.one_behind_the_other(comm)
        tell(rank=world.rank, failed=failed, wrong=wrong, graphs=graphs)


def overlap(_):
    """ms of a product, of the sum over the ranks, and of both in one block as it comes."""
    from dispatch import parallel

    with dp.World.from_env(deadline=60) as world:
        comm, m, k, n = world.communicator, 8192, 4096, 8192
        rng = np.random.default_rng(0)
        a, b = (world.device.array(rng.standard_normal(s).astype(np.float32)).astype("bf16") for s in ((m, k), (k, n)))

        def timed(call):
            best = float("inf")
            for _ in range(6):
                dp.barrier(comm=comm)
                world.device.synchronize()
                begun = time.perf_counter()
                for _ in range(5):
                    call()
                world.device.synchronize()
                best = min(best, (time.perf_counter() - begun) / 5)
            return best * 1e3

        whole = dp.matmul(a, b)
        parallel.matmul_all_reduce(a, b, comm=comm)  # which measures in how many chunks, and which way
        tell(
            product=timed(lambda: dp.matmul(a, b)),
            sum=timed(lambda: dp.all_reduce(whole, comm=comm)),
            block=timed(lambda: parallel.matmul_all_reduce(a, b, comm=comm)),
        )


def lose_block(way, victim):
    """As `lose`, in the middle of products by copies: the other has some of its memory mapped, and reads it."""
    from dispatch import parallel

    world = dp.World.from_env(deadline=60)
    kept = world.device.array(np.arange(1000.0))
    x = world.device.array(np.ones((4096, 2048), np.float32))
    w = world.device.array(np.ones((2048, 4096), np.float32))

    def multiplied():
        by = "copies" if world.size > 1 else None
        return parallel.matmul_all_reduce(x, w, comm=world.communicator, chunks=4, by=by)

    def is_right():
        return bool((multiplied().numpy() == 2048 * world.size).all())

    assert is_right()
    world.communicator.deadline = DEADLINE
    error, begun = None, time.monotonic()
    try:
        for turn in range(100_000):
            for _ in range(20):
                multiplied()
            if world.rank == int(victim) and turn == 3:
                leave(way, world)
            is_right()
    except CollectiveError as caught:
        error = caught
    except DispatchError:  # a fault: this process is of no use any more
        os._exit(1)
    took = time.monotonic() - begun
    if world.rank == int(victim):
        os._exit(1)
    world.rebuild(grace=DEADLINE)
    tell(
        rank=world.rank, size=world.size, members=world.members, generation=world.generation, took=took,
        error=type(error).__name__, after=is_right(), kept=bool((kept.numpy() == np.arange(1000.0)).all()),
    )  # fmt: skip
    world.close()


def lose(way, victim, *, as_graph=False):
    """A rank ends, stops, faults or hangs in the middle of collectives; the other goes on alone."""
    world = dp.World.from_env(deadline=60)
    kept = world.device.array(np.arange(1000.0))
    assert summed(world)
    middle = launches(world) if as_graph else in_the_middle
    world.communicator.deadline = DEADLINE
    error, begun = None, time.monotonic()
    try:
        for turn in range(100_000):
            if world.rank == int(victim) and turn == 20:
                middle(world)
                leave(way, world)
            elif turn == 20:
                middle(world)
            summed(world)
    except CollectiveError as caught:
        error = caught
    except DispatchError:  # a fault: this process is of no use any more
        os._exit(1)
    took = time.monotonic() - begun
    if world.rank == int(victim):
        os._exit(1)  # of those ways that leave a process
    world.rebuild(grace=DEADLINE)
    tell(
        rank=world.rank, size=world.size, members=world.members, generation=world.generation, took=took,
        error=type(error).__name__, after=all(summed(world) for _ in range(3)),
        kept=bool((kept.numpy() == np.arange(1000.0)).all()),
    )  # fmt: skip
    world.close()


def launches(world):
    """As `in_the_middle`, by a graph."""
    x = world.device.zeros((64 << 18,))
    call = dp.prepare(dp.AllReduceRequest(x, comm=world.communicator, out=x), graph=True)
    return lambda _: [call() for _ in range(8)]


def lose_graph(way, victim):
    """As `lose`, in the middle of launches of a collective's graph."""
    lose(way, victim, as_graph=True)


def in_the_middle(world, megabytes=64):
    """Enqueue some sums that take the GPU milliseconds, and do not wait."""
    x = world.device.zeros((megabytes << 18,))
    for _ in range(8):
        dp.all_reduce(x, comm=world.communicator, out=x)


def soak(_):
    """Live through the deaths of one partner after the other: a line for each, with what this process holds then.

    A line on stdin says where to meet the next partner.
    """
    device = dp.device(f"cuda:{os.environ['LOCAL_RANK']}")
    kept = device.array(np.arange(1_000_000.0))
    for line in sys.stdin:
        world = dp.World.from_env(device, deadline=60, port=int(line))
        sums, right, error = 0, summed(world), None
        world.communicator.deadline = DEADLINE
        begun = time.monotonic()
        try:
            while True:
                begun = time.monotonic()
                in_the_middle(world, 16)
                right = summed(world) and right
                sums += 1
        except CollectiveError as caught:
            error = caught
        took = time.monotonic() - begun
        world.rebuild(grace=DEADLINE)
        after = all(summed(world) for _ in range(3))
        facts = {"size": world.size, "generation": world.generation}
        world.close()
        tell(
            sums=sums, right=right, error=type(error).__name__, said=str(error), took=took, after=after, **facts,
            kept=bool((kept.numpy() == np.arange(1_000_000.0)).all()), in_use=device.bytes_in_use(),
            threads=threading.active_count(), files=len(os.listdir("/proc/self/fd")),
        )  # fmt: skip


def mortal(way, seconds):
    """A partner that sums for some seconds and leaves in the middle."""
    world = dp.World.from_env(deadline=60)
    summed(world)
    world.communicator.deadline = DEADLINE
    until = time.monotonic() + float(seconds)
    try:
        while time.monotonic() < until:
            in_the_middle(world, 16)
            summed(world)
        in_the_middle(world, 16)
        leave(way, world)
        while True:
            summed(world)
    except DispatchError:
        os._exit(1)


def leave(way, world):
    """End this process, or its part in the world, in one of the ways that there are."""
    if way.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, way))
        time.sleep(600)
    if way == "abort":
        world.abort("unplugged")
    else:
        launch(world.device, {"fault": "*(volatile float *)8 = 1;", "endless": "while (true) __nanosleep(1000);"}[way])


def launch(device, body):
    """One thread of a kernel on the device's current stream."""
    with device.context:
        function = loaded(f'extern "C" __global__ void leave() {{ {body} }}', "leave", (), device)
        fixed = (ctypes.c_void_p(function), 1, 1, 1, 1, 1, 1, 0, ctypes.c_void_p(device.executor().stream.handle))
        assert driver.cuLaunchKernel.unchecked(*fixed, None, None) == 0


def beside_torch(_):
    """Ours and torch.distributed over the same GPUs, in turns and on streams of their own."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    with dp.World.from_env(deadline=60) as world:
        right = []
        for turn in range(20):
            x = torch.full((4096,), float(rank + turn), device=f"cuda:{rank}")
            ours = dp.all_reduce(x, comm=world.communicator)
            dist.all_reduce(x)
            right.append(bool((ours == x).all()) and float(ours[0]) == 2 * turn + 1)
        tell(rank=rank, right=all(right), count=len(right))
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](*(sys.argv[2:] or [""]))
