"""The three ways in which a supervisor learns that the GPU is past a request, against each other.

For each: microseconds from submit() to result() back to back and after a pause, requests per second one by one and by
submit_many, and CPU seconds per second while one caller submits and waits: for 64^3 products in bf16, and for ones
that take the GPU some milliseconds.
Repeat: `python tests/benchmarks/bench_completion.py [--quick] [--device cuda:0|host] [--json FILE]`; 10 s.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal

import numpy as np
from command import command
from report import Report, say, table

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 64
STREAMS = 4
LONG = 12288  # 12288^3 in bf16: some 5 ms on an H200
BURST = 512
PAUSE = 1e-3  # seconds, after which the supervisor has nothing left to do
WAYS: tuple[Literal["poll", "block", "callback"], ...] = ("poll", "block", "callback")


def product(device: dp.Device, size: int = SIZE) -> dp.MatmulRequest:
    dtype = "f32" if device.is_host else "bf16"
    one = device.array(np.ones((size, size), np.float32), dtype)
    return dp.MatmulRequest(one, one, out=device.empty((size, size), dtype))


def cpu_share(sup: dp.Supervisor, request: dp.MatmulRequest, count: int) -> tuple[float, list[float]]:
    """CPU seconds per second of so many calls that submit and wait, and the seconds of each, sorted."""
    waits(sup, request, 5, 0)
    begun, cpu = time.perf_counter(), time.process_time()
    taken = waits(sup, request, count, 0)
    return (time.process_time() - cpu) / (time.perf_counter() - begun), taken


def waits(sup: dp.Supervisor, request: dp.MatmulRequest, count: int, pause: float) -> list[float]:
    """Seconds of so many calls that submit and wait, sorted."""
    taken = []
    for _ in range(count):
        if pause:
            time.sleep(pause)
        start = time.perf_counter()
        sup.submit(request).result()
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def rate(work: Callable[[], list[dp.Future]], bursts: int) -> float:
    """Requests per second of the median burst."""
    taken = []
    for _ in range(bursts):
        start = time.perf_counter()
        for future in work():
            future.result()
        taken.append(time.perf_counter() - start)
    return BURST / sorted(taken)[bursts // 2]


def measure(device: dp.Device, way: Literal["poll", "block", "callback"], quick: bool) -> dict[str, float]:
    with dp.Supervisor(device, streams=STREAMS, completion=way) as sup:
        request, many = product(device), [product(device) for _ in range(BURST)]
        for _ in range(4):  # calls, records, and replays from then on
            for future in sup.submit_many(many):
                future.result()
        share, back_to_back = cpu_share(sup, request, 100 if quick else 3000)
        long_share, long = cpu_share(sup, product(device, 256 if device.is_host else LONG), 5 if quick else 60)
        idle = waits(sup, request, 20 if quick else 500, PAUSE)
        bursts = 3 if quick else 30
        one_by_one = rate(lambda: [sup.submit(one) for one in many], bursts)
        at_once = rate(lambda: sup.submit_many(many), bursts)
    return {
        "back to back, us": back_to_back[len(back_to_back) // 2] * 1e6,
        "p90, us": back_to_back[len(back_to_back) * 9 // 10] * 1e6,
        "after 1 ms, us": idle[len(idle) // 2] * 1e6,
        "one by one, per s": one_by_one,
        "submit_many, per s": at_once,
        "CPU s per s": share,
        "long, us": long[len(long) // 2] * 1e6,
        "CPU s per s, long": long_share,
    }


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure all three and print them."""
    figures = {}
    for way in WAYS:
        figures[way] = measure(device, way, quick)
        report.put("completion", figures)
    say(f"\n{SIZE}^3 products, {STREAMS} workers")
    names = list(figures["poll"])
    rows = [(way, *(f"{figure[name]:,.2f}" for name in names)) for way, figure in figures.items()]
    table(("", *names), rows)


if __name__ == "__main__":
    command(main, __doc__)
