"""Latency and bandwidth of collectives over the GPUs of one machine, fitted, and what they predict for more GPUs.

One process with a thread for each GPU. Calls are captured into a graph of each thread's own and launched together, so
that times are the GPUs' and not the host's. The least of some launches counts. On the host it measures nothing and
prints the tables of docs/scaling.md, from the measured times that stand there. Repeat: `python
tests/benchmarks/bench_scaling.py [--quick] [--device cuda:0|host] [--json FILE]`; 5 s on two H200.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import scaling_model as model
from command import command
from report import Report, say, table

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

QUICK = (8, model.SMALL, model.MIB, model.LARGE, 4 * model.LARGE)  # enough for a fit
LONG = 3e-3  # seconds that a graph's calls take together, about
TURNS = 5
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def call_of(op: str, nbytes: int, world: Any) -> Callable[[], object]:
    """A call whose larger operand has so many bytes, or some more where the ranks do not divide them."""
    device, comm, n = world.device, world.communicator, world.size
    part = max(1, -(-nbytes // n))
    whole, share = device.zeros((n, part), "u8"), device.zeros((part,), "u8")
    if op == "all_reduce":
        return lambda: dp.all_reduce(whole, comm=comm, out=whole)
    if op == "broadcast":
        return lambda: dp.broadcast(whole, comm=comm, out=whole, root=0)
    if op == "all_gather":
        return lambda: dp.all_gather(share, comm=comm, out=whole)
    if op == "reduce_scatter":
        return lambda: dp.reduce_scatter(whole, comm=comm, out=share)
    other = device.zeros((n, part), "u8")
    return lambda: dp.all_to_all(whole, comm=comm, out=other)


def seconds(world: Any, meet: threading.Barrier, call: Callable[[], object], count: int) -> float:
    """Seconds of each of so many calls in one graph, the least of some launches."""
    from cudabind import driver

    call()  # connections are made
    world.device.synchronize()
    stream, graph = world.device.stream(), ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.handle)
    meet.wait(120)
    with world.device.context:
        status = driver.cuStreamBeginCapture.unchecked(handle, 1)  # of this thread alone
        with stream:
            for _ in range(count):
                call()
        status = status or driver.cuStreamEndCapture.unchecked(handle, ctypes.byref(graph))
        if status:
            raise RuntimeError(f"capturing {count} calls gave status {status}")
        executable, best = driver.cuGraphInstantiate(graph.value, 0), float("inf")
        for turn in range(TURNS + 1):
            meet.wait(120)
            begun = time.perf_counter()
            driver.cuGraphLaunch(executable, stream.handle)
            stream.synchronize()
            if turn:
                best = min(best, (time.perf_counter() - begun) / count)
        meet.wait(120)
        driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph.value)
    return best


def on_gpus(names: list[str], sizes: Sequence[int]) -> dict[str, list[float]]:
    """Seconds of each op by size, of the rank that took longest."""
    meet = threading.Barrier(len(names))

    def run(world: Any) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for op in model.OPS:
            found[op] = []
            for nbytes in sizes:
                guess = 10e-6 + nbytes / 200e9
                count = max(2, min(200, int(LONG / guess)))
                found[op].append(seconds(world, meet, call_of(op, nbytes, world), count))
        return found

    with dp.World.local(names, deadline=120) as world:
        ranks = world.run(run)
    return {op: [max(times) for times in zip(*(each[op] for each in ranks), strict=True)] for op in model.OPS}


def tables(sizes: Sequence[int], times: dict[str, list[float]], ranks: int, report: Report) -> None:
    """What was measured, the fit, and what follows from it, as they stand in docs/scaling.md."""
    fits = {op: model.fit(op, sizes, each, ranks) for op, each in times.items()}
    report.put("scaling", {op: one._asdict() for op, one in fits.items()})
    for lines in (
        model.measured_table(sizes, times),
        model.fits_table(fits),
        model.errors_table(sizes, times, fits, ranks),
        *(model.predictions_table(op, fits, ranks) for op in model.OPS),
    ):
        say("\n".join(lines))
        say()
    say("\n".join(model.published_table(fits, ranks)))


def measure(device: dp.Device, quick: bool, report: Report) -> None:
    """Print and keep all figures."""
    if device.is_host:
        tables(model.SIZES, {op: model.seconds_measured(op) for op in model.OPS}, 2, report)
        return
    from cudabind import driver

    count = int(driver.cuDeviceGetCount())
    if count < 2:
        say("nothing to measure: two GPUs are needed")
        report.put("nothing to measure", f"{count} GPU")
        return
    sizes = QUICK if quick else model.SIZES
    times = on_gpus([f"cuda:{number}" for number in range(count)], sizes)
    report.put("seconds", {op: dict(zip(map(str, sizes), each, strict=True)) for op, each in times.items()})
    rows = [
        [op, *(f"{n * model.bus(op, count) / t / 1e9:.1f}" for n, t in zip(sizes, each, strict=True))]
        for op, each in times.items()
    ]
    table([f"bus bandwidth, GB/s, {count} GPUs", *map(str, sizes)], rows)
    say()
    tables(sizes, times, count, report)


if __name__ == "__main__":
    command(measure, __doc__)
