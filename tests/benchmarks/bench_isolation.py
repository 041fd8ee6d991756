"""Workers in a child process: small requests per second, the way of a lone one, and what a fault costs.

The requests are those of bench_supervisor; isolation by threads and torch.multiprocessing (on a GPU) or Ray (on the
host) stand beside. A fault is one of tests/trouble.py: time runs from the submission of the request that faults (from
its deadline, where it never ends) to the result of another one submitted after it, with nothing else in flight (alone)
or with 40 products on other workers.
Repeat: `python tests/benchmarks/bench_isolation.py [--quick] [--device cuda:0|host] [--json FILE]`; 4 minutes.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import isolation_peers as peers
import numpy as np
from bench_supervisor import STREAMS, Product, timed, verified
from command import command
from report import Report, Target, judge, say, table
from timing import Candidate, attempt, host_race, summary

import dispatch as dp

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = str(Path(__file__).resolve().parents[1])
ONE, MANY = "submit, one by one", "submit_many"
LONE, TURNS = "a lone request, again and again", "a lone request, one of many in turn"
DIRECT, SHOT = "dp.run, direct", "matmul(out=), direct"
KINDS = {"host": ("die once",), "cuda": ("illegal address", "misaligned", "trap", "assert", "hang", "die once")}
DEADLINE = 0.25  # seconds, of a request that never ends
REPEATS = 2
TARGETS = (
    Target("threads, one by one, per second", f"thread: {ONE}, rate", 80_000, at_least=True),
    Target("process, one by one, per second", f"process: {ONE}, rate", 80_000, at_least=True),
    *(
        Target(f"{isolation}, submit_many, against direct calls", f"{isolation}: {MANY}, rate", 0.9, "", way, True)
        for isolation in ("thread", "process")
        for way in (f"{SHOT}, rate", f"{DIRECT}, rate")
    ),
    Target("process, submit_many", f"process: {MANY}, rate", 1.1, "", f"{peers.TORCH_MANY}, rate", True),
    Target("threads, a lone request", f"thread: {LONE}", 32, "us"),
    Target("process, a lone request", f"process: {LONE}", 42, "us"),
    Target("threads, one of many in turn", f"thread: {TURNS}", 32, "us"),
    Target("process, one of many in turn", f"process: {TURNS}", 42, "us"),
    *(
        Target(f"{kind}, {spare} spare, next result", f"{kind}, {spare} spare", 0.3 if spare else 1.0, "s")
        for kind in ("median of all", *KINDS["cuda"])
        for spare in (0, 1)
    ),
)


def ours(name: str, sup: dp.Supervisor, product: Product) -> list[Candidate]:
    """The four ways through one supervisor."""
    single, many, lone, turns = (product.requests() for _ in range(4))

    def one_by_one() -> None:
        for future in [sup.submit(request) for request in single]:
            future.result()

    def at_once() -> None:
        for future in sup.submit_many(many):
            future.result()

    def again() -> None:
        for _ in lone:
            sup.submit(lone[-1]).result()

    def in_turn() -> None:
        for request in turns:
            sup.submit(request).result()

    works = ((ONE, one_by_one, single), (MANY, at_once, many), (LONE, again, lone), (TURNS, in_turn, turns))
    return [
        Candidate(f"{name}: {way}", timed(work), lambda last=requests[-1]: last.out.numpy().astype(np.float64))
        for way, work, requests in works
    ]


def direct(name: str, product: Product) -> Candidate:
    """The caller's own calls, on one stream."""
    requests = product.requests()

    def by_request() -> None:
        for request in requests:
            dp.run(request)
        product.device.synchronize()

    def by_operands() -> None:
        for request in requests:
            dp.matmul(request.a, request.b, out=request.out)
        product.device.synchronize()

    work = by_request if name == DIRECT else by_operands
    return Candidate(name, timed(work), lambda: requests[-1].out.numpy().astype(np.float64))


def rates(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep how many requests a second go each way, and how long a lone one takes."""
    missing: dict[str, str] = {}
    calls, bursts = (64, 3) if quick else (512, 20)
    with contextlib.ExitStack() as stack:
        found: list[Candidate] = []
        plain = Product(device, calls)
        if not device.is_host:
            found += verified([direct(SHOT, plain), direct(DIRECT, plain)], plain, missing)
        for isolation in ("thread", "process"):
            sup = stack.enter_context(dp.Supervisor(device.name, streams=STREAMS, isolation=isolation))
            product = Product(sup.device, calls)
            found += verified(ours(isolation, sup, product), product, missing)
        seconds, failed = host_race(found, device.synchronize, bursts=bursts, calls=1)
    missing |= failed
    with contextlib.ExitStack() as stack:
        # After ours have ended. With the peer's four processes alive, though idle, a lone one of many took 47 - 66 us
        # with threads and 79 - 102 with a process in three runs; without, on other hosts, 32 - 43 and 40 - 57 in three.
        peer = peers.ray_actors if device.is_host else peers.torch_processes
        made = attempt(peer.__name__, lambda: stack.enter_context(peer(plain, STREAMS)), missing) or []
        of_peer, failed = host_race(verified(made, plain, missing), device.synchronize, bursts=bursts, calls=1)
    seconds |= of_peer
    missing |= failed
    figures = {name: summary([taken / calls for taken in values]) for name, values in seconds.items()}
    say(f"\n{calls} requests of 64^3, {STREAMS} workers, {bursts} bursts, us for each")
    rows = [
        (name, *(f"{figure[key]:.2f}" for key in ("median", "p25", "p75", "best")), f"{1e6 / figure['median']:,.0f}")
        for name, figure in figures.items()
    ]
    table(("", "median", "p25", "p75", "best", "per second"), rows)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("rates", {"us": figures, "calls": calls, "bursts": bursts, "missing": missing})
    medians = {name: figure["median"] for name, figure in figures.items()}
    return medians | {f"{name}, rate": 1e6 / median for name, median in medians.items()}


@contextlib.contextmanager
def trouble() -> Iterator[Any]:
    """tests/trouble.py, by the name by which children import it."""
    sys.path.insert(0, TESTS)
    import trouble as module

    yield module
    for row in module.ROWS:
        dp.TABLE.unregister(row)
    del sys.modules["trouble"]
    sys.path.remove(TESTS)


def recovery(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep the seconds from a fault to the next result; medians."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    kinds = KINDS["host" if device.is_host else "cuda"]
    with trouble() as module, tempfile.TemporaryDirectory() as folder:
        for spare in (0, 1):
            with dp.Supervisor(
                device.name, streams=STREAMS, isolation="process", setup=("trouble",), max_restarts=10_000, spare=spare
            ) as sup:
                for kind in kinds:
                    found[f"{kind}, {spare} spare"] = {
                        company: [
                            once(sup, module, kind, company, spare, folder) for _ in range(1 if quick else REPEATS)
                        ]
                        for company in ("alone", "in company")
                    }
    report.put("recovery", {"seconds": found})
    say("\nfrom a fault to what follows, s, median of each")
    rows = [
        (name, company, *(f"{statistics.median(part):.3f}" for part in zip(*times, strict=True)))
        for name, both in found.items()
        for company, times in both.items()
    ]
    table(("", "", "next result", "verdict"), rows)
    next_results = {name: [first for times in both.values() for first, _ in times] for name, both in found.items()}
    for spare in (0, 1):
        of_all = [next_results[f"{kind}, {spare} spare"] for kind in kinds]
        next_results[f"median of all, {spare} spare"] = [second for times in of_all for second in times]
    return {name: statistics.median(times) for name, times in next_results.items()}


def once(sup: dp.Supervisor, module: Any, kind: str, company: str, spare: int, folder: str) -> tuple[float, float]:
    """Seconds until the next result, 0 where no other worker was held up, and until the guilty request has ended."""
    ready(sup, spare)
    product = Product(sup.device, 40)
    good = product.requests()
    for future in sup.submit_many(good, worker=[1, 2, 3]):
        future.result()
    died = f"{folder}/{time.monotonic_ns()}" if kind == "die once" else ""  # where the child has died before
    bad = module.Trouble(kind, sup.device.zeros(64), sup.device.zeros(64), once=died)
    ends = DEADLINE if kind == "hang" else None
    started = time.perf_counter() + (ends or 0)
    guilty = sup.submit(bad, worker=0, timeout=ends)
    if company == "alone":
        guilty.exception()
        verdict = time.perf_counter() - started
    other = sup.submit_many(good, worker=[1, 2, 3])
    other[0].result()
    next_result = max(time.perf_counter() - started, 0.0)
    if company != "alone":
        guilty.exception()
        verdict = time.perf_counter() - started
    for future in other:
        future.result()
    return next_result, verdict


def ready(sup: dp.Supervisor, spare: int) -> None:
    """Wait until those that stand by do: the first fault of a program comes later than that."""
    standby = sup._pool.standby
    pause = threading.Event()
    while len(standby.children) <= spare or sum(child.was_sent_go for child in standby.children) < spare:
        pause.wait(0.05)
    pause.wait(1.0)  # what they do next, importing and making a context, tells nobody when it is over


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    figures = rates(device, report, quick) | recovery(device, report, quick)
    if device.is_host:
        say("\nno verdicts: the targets are for a GPU")
    else:
        judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(main, __doc__)
