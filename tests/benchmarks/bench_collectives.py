"""Collectives over the GPUs of one machine beside torch.distributed: bus bandwidth by size, host time of small calls.

One process for each GPU is started by this one, with torchrun's variables; both sides run in the same processes, in
turns, over the same memory, each with its own communicator of NCCL. Bus bandwidth is as nccl-tests has it: bytes a
second, of all_reduce times 2(n-1)/n, of all_gather, reduce_scatter and all_to_all times (n-1)/n. Then sharded products
beside the longer of their product and collective, and steps of training beside torch's DDP. Repeat:
`python tests/benchmarks/bench_collectives.py [--quick] [--device cuda:0|host] [--json FILE]`; two minutes on two
GPUs. On the host it times threads of one process, without a peer.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import parallel_races as races
from command import command
from report import Report, Target, judge, say, table

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
OURS, TORCH = "dispatch", "torch.distributed"
SMALL = "host time of all_reduce of 1 KiB, us"
LEAST = "least share of torch's bus bandwidth"
IDEAL, SCALES = "least share of the ideal", "least of DDP's step by ours"
ENOUGH, SMALL_SHARE = 0.98, 0.5


def factor(op: str, ranks: int) -> float:
    """The bytes that cross the bus for each byte of the larger operand."""
    return {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(op, (ranks - 1) / ranks)


# -- one rank ---------------------------------------------------------------------------------------------------------
def calls_of(op: str, nbytes: int, comm: Any, torch: Any, dist: Any) -> dict[str, Callable[[], object]]:
    """What each side repeats, over the same memory, in f32."""
    n = comm.size
    rows = nbytes // 4 // n
    whole = torch.ones((n, rows), device="cuda")
    part, other = torch.ones(rows, device="cuda"), torch.empty((n, rows), device="cuda")
    mine, theirs = {
        "all_reduce": (
            lambda: dp.AllReduceRequest(whole, comm=comm, out=whole),
            lambda: dist.all_reduce(whole),
        ),
        "all_gather": (
            lambda: dp.AllGatherRequest(part, comm=comm, out=other),
            lambda: dist.all_gather_into_tensor(other, part),
        ),
        "reduce_scatter": (
            lambda: dp.ReduceScatterRequest(whole, comm=comm, out=part),
            lambda: dist.reduce_scatter_tensor(part, whole),
        ),
        "all_to_all": (
            lambda: dp.AllToAllRequest(whole, comm=comm, out=other),
            lambda: dist.all_to_all_single(other, whole),
        ),
        "broadcast": (
            lambda: dp.BroadcastRequest(whole, comm=comm, out=whole, root=0),
            lambda: dist.broadcast(whole, 0),
        ),
    }[op]
    return {OURS: dp.prepare(mine()), TORCH: theirs}


def seconds(call: Callable[[], object], repeats: int, torch: Any, dist: Any) -> float:
    """Seconds for each of so many calls, on the GPU; all ranks begin together."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(repeats):
        call()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3 / repeats


def host_time(call: Callable[[], object], torch: Any, repeats: int) -> float:
    """Microseconds of the host for each call, the median of batches that no full queue holds up."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(50):
            call()
        found.append((time.perf_counter() - begun) / 50 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def rank_main(quick: bool) -> None:
    """One rank's part: rank 0 prints the figures."""
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    figures: dict[str, Any] = {"nccl of torch": list(torch.cuda.nccl.version())}
    stream = torch.cuda.Stream()
    with dp.World.from_env(deadline=120) as world, torch.cuda.stream(stream), dp.Stream(stream):
        comm = world.communicator
        for op in OPS:
            for nbytes in SIZES[:4] if quick else SIZES:
                sides = calls_of(op, nbytes, comm, torch, dist)
                repeats = 5 if quick else max(5, min(200, 2 * GIB // nbytes // 4))
                best = dict.fromkeys(sides, float("inf"))
                for turn in range(2 if quick else 6):  # each side first in half of the turns
                    for side in list(sides)[:: 1 if turn % 2 else -1]:
                        best[side] = min(best[side], seconds(sides[side], repeats, torch, dist))
                for side, took in best.items():
                    figures[f"{side}, {op}, {nbytes}"] = nbytes * factor(op, size) / took / 1e9
        x = torch.ones(256, device="cuda")
        out = torch.empty_like(x)
        request = dp.AllReduceRequest(x, comm=comm, out=out)
        bound = dp.prepare(request)
        small: dict[str, Callable[[], Callable[[], object]]] = {  # in this order: captures make later calls slower
            OURS: lambda: lambda: dp.all_reduce(x, comm=comm, out=out),
            f"{OURS}, bound": lambda: bound,
            TORCH: lambda: lambda: dist.all_reduce(x),
            f"{OURS}, bound, as a graph": lambda: dp.prepare(request, graph=True),
            f"{OURS}, bound, beside graphs": lambda: bound,
        }
        for side, make in small.items():
            call = make()
            for _ in range(200):
                call()
            figures[f"{side}, {SMALL}"] = host_time(call, torch, 10 if quick else 60)
        figures["products"] = races.products(comm, quick, lambda call, n: seconds(call, n, torch, dist))
        figures["training"] = races.training(world, rank, quick)
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(figures))


def started(count: int, quick: bool) -> dict[str, Any]:
    """The figures of rank 0, of as many processes as there are GPUs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"PYTHONPATH": str(Path(__file__).parents[2]), "NCCL_NVLS_ENABLE": "0"}
    words = [sys.executable, __file__, "--rank", *(["--quick"] if quick else [])]
    ranks = [
        subprocess.Popen(
            words,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [rank.communicate(timeout=540)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank ended with {[rank.returncode for rank in ranks]}")
    found: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return found


def on_host(report: Report, quick: bool) -> None:
    """Threads of one process, which hand arrays over: how long that takes, and nothing to compare it with."""
    figures = {}
    for nbytes in (KIB, MIB):

        def run(world: Any, nbytes: int = nbytes) -> float:
            x = world.device.array(np.ones(nbytes // 4, np.float32))
            call = dp.prepare(dp.AllReduceRequest(x, comm=world, out=world.device.empty(x.shape)))
            begun, repeats = time.perf_counter(), 20 if quick else 200
            for _ in range(repeats):
                call()
            return (time.perf_counter() - begun) / repeats * 1e6

        with dp.World.local(["host"] * 2, deadline=60) as world:
            figures[f"{OURS}, all_reduce, {nbytes}, us"] = statistics.median(world.run(run))
    report.put("collectives", figures)
    table(["all_reduce between two threads of the host", "us"], [[k, f"{v:.1f}"] for k, v in figures.items()])


def measure(device: dp.Device, quick: bool, report: Report) -> None:
    """Print and keep all figures, and judge them."""
    if device.is_host:
        on_host(report, quick)
        return
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        say("nothing to measure: two GPUs are needed")
        report.put("nothing to measure", f"{count} GPU")
        return
    figures = started(count, quick)
    report.put("collectives", figures)
    for op in OPS:
        rows = []
        for nbytes in SIZES[:4] if quick else SIZES:
            ours, theirs = (figures[f"{side}, {op}, {nbytes}"] for side in (OURS, TORCH))
            rows.append([f"{nbytes / MIB:g} MiB", f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.3f}"])
        say()
        table([f"{op}, bus bandwidth, GB/s", OURS, TORCH, "ratio"], rows)
    sides = (OURS, *(f"{OURS}, bound{how}" for how in ("", ", beside graphs", ", as a graph")), TORCH)
    small = [[side, f"{figures[f'{side}, {SMALL}']:.1f}"] for side in sides]
    say()
    table([SMALL, "us"], small)
    sizes = SIZES[:4] if quick else SIZES
    figures[LEAST] = min(figures[f"{OURS}, {op}, {n}"] / figures[f"{TORCH}, {op}, {n}"] for op in OPS for n in sizes)
    rows = []
    shares = races.share_of_ideal(figures["products"])
    for name, share in shares.items():
        times = [figures["products"][f"{name} {what}"] * 1e3 for what in ("block", "product", "collective")]
        rows.append([name, *(f"{t:.3f}" for t in times), f"{share:.3f}"])
    say()
    table(["m x k x n, bf16", "block, ms", "product", "collective", "share of the ideal"], rows)
    say()
    table(["training", "figure"], [[name, f"{value:.4g}"] for name, value in figures["training"].items()])
    figures[IDEAL] = min(shares.values())
    networks = [name.removesuffix(", DDP, ms") for name in figures["training"] if name.endswith(", DDP, ms")]
    steps = [
        figures["training"][f"{name}, DDP, ms"] / figures["training"][f"{name}, dispatch, ms"] for name in networks
    ]
    figures[SCALES] = min(steps)
    targets = [
        Target("sharded products, the least share of the ideal", IDEAL, 0.9, at_least=True),
        Target("a step of training, the least of DDP's time by ours", SCALES, 1.0, at_least=True),
        Target("bus bandwidth, the least share of torch's", LEAST, ENOUGH, at_least=True),
        Target("a small all_reduce on the host", f"{OURS}, {SMALL}", SMALL_SHARE, "us", f"{TORCH}, {SMALL}"),
        Target("the same, bound", f"{OURS}, bound, {SMALL}", SMALL_SHARE, "us", f"{TORCH}, {SMALL}"),
        Target("the same, as a graph", f"{OURS}, bound, as a graph, {SMALL}", SMALL_SHARE, "us", f"{TORCH}, {SMALL}"),
    ]
    judge(targets, figures, report)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        rank_main("--quick" in sys.argv)
    else:
        command(measure, __doc__)
