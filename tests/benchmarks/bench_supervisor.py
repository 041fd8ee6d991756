"""Requests per second through a supervisor: 64 by 64 by 64 products in bf16, each with an output of its own.

Every candidate takes the same number of requests from "here they are" to "all are done", in turns; the median of the
bursts counts. The peer is what one would write without a supervisor: a ThreadPoolExecutor whose tasks run torch.mm on
their thread's stream and wait for its event (np.matmul where there is no GPU).
Besides, how the rates change with the number of threads that call directly, and with that of a supervisor's streams.
Repeat: `python tests/benchmarks/bench_supervisor.py [--quick] [--device cuda:0|host] [--json FILE]`; 40 s.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import growth
import numpy as np
from command import command
from report import Report, Target, judge, say, table
from timing import Candidate, attempt, host_race, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 64
STREAMS = 4
LONG = 8  # times as many requests in a long burst
WARM = 4  # runs before the clock: the first calls the library, the second records the call, and placing settles
TOLERANCE = 1e-2  # of |result - reference| / |reference|: bf16 rounding is about 3e-3
SHOT, DIRECT = "matmul(out=), direct", "dp.run, direct"
SUBMIT, MANY, HOP = "submit, one by one", "submit_many", "submit and wait for each"
TORCH, NUMPY = "ThreadPoolExecutor, torch.mm + event", "ThreadPoolExecutor, np.matmul"
TARGETS = (
    Target("one by one, against a thread pool", SUBMIT, 2.0, peer=TORCH, at_least=True),
    Target("submit_many, against one-shot calls", MANY, 0.8, peer=SHOT, at_least=True),
    Target("submit_many, against dp.run", MANY, 0.9, peer=DIRECT, at_least=True),
    *(
        Target(f"{name(count)}, against 1", name(count), 0.9, peer=name(1), at_least=True)
        for name, counts in ((growth.threads_name, growth.THREADS), (growth.streams_name, growth.STREAMS))
        for count in counts[1:]
    ),
)
Array = np.ndarray[Any, np.dtype[Any]]


class Product:
    """The same product many times over; each candidate has its own requests, for each is bound to where it ran last."""

    def __init__(self, device: dp.Device, calls: int) -> None:
        rng = np.random.default_rng(64)
        # Multiples of 1/16 below 2 are exact in bf16.
        self.a, self.b = ((rng.integers(-31, 32, (SIZE, SIZE)) / 16).astype(np.float32) for _ in range(2))
        self.device, self.calls = device, calls
        self.dtype = "f32" if device.is_host else "bf16"

    def requests(self) -> list[dp.MatmulRequest]:
        a, b = self.device.array(self.a, self.dtype), self.device.array(self.b, self.dtype)
        outs = [self.device.array(np.full((SIZE, SIZE), np.nan), self.dtype) for _ in range(self.calls)]
        self.device.synchronize()
        return [dp.MatmulRequest(a, b, out=out) for out in outs]


def timed(work: Callable[[], object]) -> Callable[[int], float]:
    """A burst that does the work once, whatever number it is asked for: `calls` requests are one piece of work."""

    def burst(_: int) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return burst


def ours(product: Product, sup: dp.Supervisor) -> list[Candidate]:
    """Direct calls on the calling thread, and three ways through the supervisor."""
    shots, direct, single, many, hop = (product.requests() for _ in range(5))

    def run() -> None:
        for request in direct:
            dp.run(request)
        product.device.synchronize()

    def one_by_one() -> None:
        for future in [sup.submit(request) for request in single]:
            future.result()

    def all_at_once() -> None:
        for future in sup.submit_many(many):
            future.result()

    def each() -> None:
        for request in hop:
            sup.submit(request).result()

    def one_shot() -> None:
        for request in shots:
            dp.matmul(request.a, request.b, out=request.out)
        product.device.synchronize()

    works = (
        (SHOT, one_shot, shots),
        (DIRECT, run, direct),
        (SUBMIT, one_by_one, single),
        (MANY, all_at_once, many),
        (HOP, each, hop),
    )
    return [
        Candidate(name, timed(work), lambda last=requests[-1]: last.out.numpy().astype(np.float64))
        for name, work, requests in works
    ]


def torch_pool(product: Product, pool: ThreadPoolExecutor) -> list[Candidate]:
    """One task for each product: run it on the thread's own stream, record an event, wait for it."""
    import torch

    a, b = (torch.from_numpy(x).to("cuda", torch.bfloat16) for x in (product.a, product.b))
    outs = [torch.full_like(a, float("nan")) for _ in range(product.calls)]
    torch.cuda.synchronize()
    local = threading.local()

    def task(out: Any) -> Any:
        if not hasattr(local, "stream"):
            local.stream, local.event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(local.stream):
            torch.mm(a, b, out=out)
            local.event.record()
        local.event.synchronize()
        return out

    def work() -> None:
        for future in [pool.submit(task, out) for out in outs]:
            future.result()

    return [Candidate(TORCH, timed(work), lambda: outs[-1].float().cpu().numpy())]


def numpy_pool(product: Product, pool: ThreadPoolExecutor) -> list[Candidate]:
    outs = [np.full((SIZE, SIZE), np.nan, np.float32) for _ in range(product.calls)]

    def work() -> None:
        for future in [pool.submit(np.matmul, product.a, product.b, out) for out in outs]:
            future.result()

    return [Candidate(NUMPY, timed(work), lambda: outs[-1])]


def verified(candidates: list[Candidate], product: Product, missing: dict[str, str]) -> list[Candidate]:
    """Those that compute the right product, once they are warm: one that does nothing must not win."""
    want = product.a.astype(np.float64) @ product.b
    right = []
    for candidate in candidates:
        for _ in range(WARM):
            attempt(candidate.name, lambda burst=candidate.burst: burst(1), missing)
        result = attempt(candidate.name, candidate.result, missing)
        if result is None or candidate.name in missing:
            continue
        error = np.linalg.norm(result - want) / np.linalg.norm(want)
        if error < TOLERANCE:  # false for NaN
            right.append(candidate)
        else:
            missing[candidate.name] = f"wrong result: relative error {error:.1e}"
    return right


def race(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep the rates of all candidates; returns the medians in requests per second."""
    missing: dict[str, str] = {}
    calls, bursts = (64, 5) if device.is_host and quick else (512, 5) if quick else (512, 40)
    product = Product(device, calls)
    with ThreadPoolExecutor(STREAMS) as pool, dp.Supervisor(device, streams=STREAMS) as sup:
        peer = numpy_pool if device.is_host else torch_pool
        candidates = attempt("pool", lambda: peer(product, pool), missing) or []
        candidates += ours(product, sup)
        candidates = verified(candidates, product, missing)
        # One call to the race is one piece of work; its synchronization between bursts finds nothing left to wait for.
        seconds, failed = host_race(candidates, device.synchronize, bursts=bursts, calls=1)
        stats = sup.stats()
    missing |= failed
    figures = {name: summary([taken / calls for taken in values]) for name, values in seconds.items()}
    rates = {name: 1e6 / figure["median"] for name, figure in figures.items()}
    show(figures, rates, f"{calls} requests of {SIZE}^3 in {product.dtype}, {STREAMS} workers, {bursts} bursts")
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("bursts", {"count": bursts, "calls": calls, "us": figures, "rates": rates, "missing": missing})
    report.put("latency of one in 64, s", {"p50": stats.p50, "p90": stats.p90, "p99": stats.p99})
    return rates


def grow(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep the rates of more and more threads and streams; returns the medians in requests per second.

    Of threads in short bursts first, in which 64 of them wake, call 32 times and wait each, then in long ones, whose
    rates are aimed at.
    """
    calls, bursts = (128, 3) if device.is_host and quick else (2048, 5) if quick else (2048, 30)
    product = Product(device, calls)
    rates: dict[str, float] = {}
    for rounds in (1,) if device.is_host else (1, LONG):
        rates |= grow_in_bursts(product, report, rounds, max(bursts // rounds, 3))
    return rates


def grow_in_bursts(product: Product, report: Report, rounds: int, bursts: int) -> dict[str, float]:
    """The same of bursts in which each request is run so many times."""
    missing: dict[str, str] = {}
    device, calls = product.device, product.calls * rounds
    with ExitStack() as stack:
        made = growth.threads(stack, lambda: product.requests() * rounds, timed)
        if rounds == 1:
            made += growth.streams(stack, device, product.requests, timed)
        candidates = verified(made, product, missing)
        seconds, failed = host_race(candidates, device.synchronize, bursts=bursts, calls=1)
    missing |= failed
    figures = {name: summary([taken / calls for taken in values]) for name, values in seconds.items()}
    rates = {name: 1e6 / figure["median"] for name, figure in figures.items()}
    say(f"\n{calls} requests of {SIZE}^3 in {product.dtype}, {bursts} bursts, us for each request until all are done")
    rows = []
    for name, figure in figures.items():
        one = growth.threads_name(1) if name.startswith("matmul") else growth.streams_name(1)
        share = f"{rates[name] / rates[one]:.2f}" if one in rates else "-"
        times = (f"{figure[key]:.2f}" for key in ("median", "p25", "p75", "best"))
        rows.append((name, *times, f"{rates[name]:,.0f}", share))
    table(("", "median", "p25", "p75", "best", "per second", "of one"), rows)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    name = "growth" if rounds == 1 else "growth in long bursts"
    report.put(name, {"count": bursts, "calls": calls, "us": figures, "rates": rates, "missing": missing})
    return rates


def show(figures: dict[str, dict[str, float]], rates: dict[str, float], title: str) -> None:
    peer = TORCH if TORCH in rates else NUMPY
    say(f"\n{title}, us for each request until all are done")
    rows = []
    for name, figure in figures.items():
        ratios = [f"{rates[name] / rates[base]:.2f}" if base in rates else "-" for base in (DIRECT, peer)]
        times = (f"{figure[key]:.2f}" for key in ("median", "p25", "p75", "best"))
        rows.append((name, *times, f"{rates[name]:,.0f}", *ratios))
    table(("", "median", "p25", "p75", "best", "per second", "of direct", "of the pool"), rows)


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    rates = race(device, report, quick)
    rates |= grow(device, report, quick)
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, rates, report)


if __name__ == "__main__":
    command(main, __doc__)
