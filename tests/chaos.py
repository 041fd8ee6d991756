"""Mixed requests from many clients, with faults among them at seeded moments: what must hold whatever happens.

The tests call `storm` with a number of requests, on the host and on a GPU. For a soak run it by the clock:
`python tests/chaos.py --device cuda:0 --seconds 600`, which prints memory over time and fails where it grows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import resource
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from chaos_client import PATIENCE, Client, N, is_close
from remains import addresses, first_free_descriptor, in_destructor, resident

import dispatch as dp
from dispatch.errors import (
    DeadlineExceeded,
    DeviceFault,
    HookFailed,
    OutOfMemory,
    QueueFull,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLIENTS, TASKS = 8, 16  # threads, and tasks of one asyncio loop
QUEUE = 128  # requests that may wait for each of the workers
STREAMS = 4
HANG_SECONDS, TIMEOUT = 1.0, 0.5

# What the requests that go wrong must end in; those with None are done to the supervisor, or to this process, and end
# none: signals to the child at work and to one that stands by, one to the main thread, limits of the system.
HOST_FAULTS = {"die": DeviceFault, "kill": None, "stop": None}
GPU_FAULTS = {
    "illegal address": DeviceFault,
    "misaligned": DeviceFault,
    "trap": DeviceFault,
    "assert": DeviceFault,
    "kill": None,
    "stop": None,
}
FAULTS = {
    "hang": DeadlineExceeded,
    "out of memory": OutOfMemory,
    "raise": RuntimeError,
    "hook": HookFailed,
    "burst": None,
    "interrupt": None,
    "pause": None,
    "stop one that stands by": None,
    "no descriptors": None,
    "no memory": None,
}
NO_REQUEST = {kind for kinds in (HOST_FAULTS, GPU_FAULTS, FAULTS) for kind, error in kinds.items() if error is None}
BETWEEN = 200  # requests that must end between two faults of a soak
INTERRUPTS = 8  # of the main thread between two faults of a soak
PINCH = 0.2  # seconds for which the system gives nothing more
SLACK = 4 << 20  # bytes of addresses that there are then: for Python's own, but for no chunk and no thread


@dataclass
class Outcome:
    """What came of a storm."""

    requests: int = 0
    ended: Counter[str] = field(default_factory=Counter)  # by kind of request and what it ended in
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # in words: everything that must not be
    restarts: int = 0
    seconds: float = 0.0
    interrupts: int = 0  # that reached the main thread in the midst of its requests
    mains: int = 0  # requests of that


class Storm:
    """One supervisor under its clients."""

    def __init__(self, sup: dp.Supervisor, seed: int, requests: int | None, faults: dict[int, str]) -> None:
        self.sup, self.seed, self.limit, self.faults = sup, seed, requests, faults
        self.tickets = itertools.count()
        self.outcome = Outcome()
        self.unended: set[int] = set()  # the tickets of futures that have not ended
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.is_exposed = False  # whether the main thread may be interrupted now
        self.pinched = threading.Lock()
        rng = np.random.default_rng(seed)
        dev = sup.device
        self.pairs = []
        for _ in range(8):
            a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
            self.pairs.append((dev.array(a), dev.array(b), a.astype(np.float64) @ b))
        self.vector = rng.standard_normal(64).astype(np.float32)
        self.source = dev.array(self.vector)

    # -- what clients do ----------------------------------------------------------------------------------------------
    def tickets_of_a_client(self) -> Iterator[int]:
        while not self.over.is_set():
            ticket = next(self.tickets)
            if self.limit is not None and ticket >= self.limit:
                return
            yield ticket

    def wrong(self, words: str) -> None:
        with self.lock:
            self.outcome.wrong.append(words)

    def submit(self, ticket: int, request: Any, **options: Any) -> dp.Future:
        """Submit, waiting where the queues are full."""
        while True:
            try:
                future = self.sup.submit(request, **options)
            except QueueFull:
                self.over.wait(0.001)  # the queues empty themselves; nothing tells when
                continue
            self.unended.add(ticket)
            future.add_done_callback(lambda _: self.end(ticket))
            return future

    def end(self, ticket: int) -> None:
        """A future has ended, which it must do once."""
        try:
            self.unended.remove(ticket)
        except KeyError:
            self.wrong(f"request {ticket} ended twice")

    def count(self, kind: str, error: BaseException | None) -> None:
        with self.lock:
            self.outcome.requests += 1
            self.outcome.ended[f"{kind}: {'done' if error is None else type(error).__name__}"] += 1

    def fault(self, ticket: int, kind: str) -> None:
        """Do what the plan has for this moment, and see that only the guilty one pays."""
        self.outcome.faults[kind] += 1
        dev = self.sup.device
        if kind in ("kill", "stop", "pause", "stop one that stands by"):
            children = [self.sup._pool._child] if "stands" not in kind else self.sup._pool.standby.children[:1]
            for child in filter(None, children):
                # Not os.kill: another fault may have ended it just now.
                child.process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                if kind == "pause":
                    self.over.wait(PINCH)
                    child.process.send_signal(signal.SIGCONT)
        elif kind == "interrupt":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        elif kind == "no descriptors":
            self.pinch(resource.RLIMIT_NOFILE, first_free_descriptor())
        elif kind == "no memory":
            self.pinch(resource.RLIMIT_AS, addresses() + SLACK)
        elif kind == "burst":
            a, b, _ = self.pairs[0]
            try:
                self.sup.submit_many([dp.MatmulRequest(a, b)] * (2 * STREAMS * QUEUE))
                self.wrong("more requests than the queues hold were taken")
            except QueueFull:
                pass
        else:
            trouble = sys.modules["trouble"].Trouble(kind, self.source, dev.zeros(64))
            future = self.submit(ticket, trouble, **({"timeout": TIMEOUT} if kind == "hang" else {}))
            error = future.exception(PATIENCE)
            self.count(kind, error)
            wanted = {**HOST_FAULTS, **GPU_FAULTS, **FAULTS}[kind]
            if not isinstance(error, wanted):
                self.wrong(f"{kind} ended in {error!r}, not in {wanted.__name__}")

    def pinch(self, what: int, limit: int) -> None:
        """Have the system give nothing more for a moment, in which a child must be replaced."""
        with self.pinched:
            soft, hard = resource.getrlimit(what)
            resource.setrlimit(what, (limit if soft == resource.RLIM_INFINITY else min(limit, soft), hard))
            try:
                child = self.sup._pool._child
                if child is not None:
                    child.process.send_signal(signal.SIGKILL)
                self.over.wait(PINCH)
            finally:
                resource.setrlimit(what, (soft, hard))

    def main(self, threads: list[threading.Thread]) -> None:
        """The client of the main thread, which is interrupted now and then, until the threads have ended."""
        mine: list[dp.Future] = []
        while any(thread.is_alive() for thread in threads):
            try:
                self.is_exposed = True
                self.step(mine)
                self.is_exposed = False
            except KeyboardInterrupt:  # noqa: PERF203
                self.is_exposed = False
                self.outcome.interrupts += 1
        for future in mine:
            future.exception(PATIENCE)  # TimeoutError where it never ended

    def on_interrupt(self, _number: int, frame: Any) -> None:
        if self.is_exposed and not in_destructor(frame):
            self.is_exposed = False
            raise KeyboardInterrupt

    def step(self, mine: list[dp.Future]) -> None:
        a, b, right = self.pairs[self.outcome.mains % len(self.pairs)]
        try:
            mine.append(self.sup.submit(dp.MatmulRequest(a, b)))
            if self.outcome.mains % 5 == 0:
                mine += self.sup.submit_many([dp.MatmulRequest(a, b)] * 3)
        except QueueFull:
            self.over.wait(0.001)
        while mine:
            if not is_close(mine[-1].result(PATIENCE).numpy(), right):
                self.wrong("a product of the main thread is not right")
            mine.pop()
        self.outcome.mains += 1

    def thread(self, index: int) -> None:
        """A client with requests of four kinds, of which several are in flight."""
        try:
            client = Client(self, np.random.default_rng([self.seed, index]))
            for ticket in self.tickets_of_a_client():
                kind = self.faults.get(ticket)
                if kind is not None:
                    self.fault(ticket, kind)
                else:
                    client.send(ticket)
            client.settle(0)
        except BaseException as error:  # noqa: BLE001  # a client that broke is a finding of the test
            self.wrong(f"client {index} broke: {error!r}")

    def loop(self) -> None:
        """The clients of an asyncio loop."""
        try:
            with ThreadPoolExecutor(TASKS) as executor:
                together = threading.Barrier(TASKS)  # all its threads are there before the system gives no more
                list(executor.map(lambda _: together.wait(), range(TASKS)))
                asyncio.run(self.tasks(executor))
        except BaseException as error:  # noqa: BLE001  # as in `thread`
            self.wrong(f"the asyncio loop broke: {error!r}")

    async def tasks(self, executor: ThreadPoolExecutor) -> None:
        await asyncio.gather(*(self.task(executor) for _ in range(TASKS)))

    async def task(self, executor: ThreadPoolExecutor) -> None:
        for ticket in self.tickets_of_a_client():
            kind = self.faults.get(ticket)
            if kind is not None:
                await asyncio.get_running_loop().run_in_executor(executor, self.fault, ticket, kind)
                continue
            a, b, right = self.pairs[ticket % len(self.pairs)]
            out = await asyncio.wait_for(self.submit(ticket, dp.MatmulRequest(a, b)), PATIENCE)
            self.count("awaited", None)
            if not is_close(out.numpy(), right):
                self.wrong(f"awaited product {ticket} is not right")


def plan(seed: int, requests: int, faults: int, on_gpu: bool) -> dict[int, str]:
    """At which tickets which fault comes: all kinds in turn, at moments that the seed says."""
    kinds = [*(GPU_FAULTS if on_gpu else HOST_FAULTS), *FAULTS]
    moments = np.random.default_rng(seed).choice(np.arange(requests // 50, requests), faults, replace=False)
    return {int(moment): kinds[number % len(kinds)] for number, moment in enumerate(moments)}


def storm(
    device: str, seed: int, requests: int | None, faults: dict[int, str], during: Callable[[Storm], None] | None = None
) -> Outcome:
    """Run the clients until so many requests are through, or `during` returns; all that must not be is in `wrong`."""
    began = time.monotonic()
    sup = dp.Supervisor(
        device, streams=STREAMS, isolation="process", queue_size=QUEUE, when_full="raise", spare=1,
        max_restarts=10_000, setup=("trouble", "chaos_hook"), hang_seconds=HANG_SECONDS,
    )  # fmt: skip
    with sup:
        made = Storm(sup, seed, requests, faults)
        rng = np.random.default_rng(seed + 1)
        untouched = [(sup.device.array(block), block) for block in rng.integers(0, 255, (4, 1 << 20), dtype=np.uint8)]
        threads = [threading.Thread(target=made.thread, args=(index,)) for index in range(CLIENTS)]
        threads.append(threading.Thread(target=made.loop))
        before = signal.signal(signal.SIGINT, made.on_interrupt)  # ahead of the first that is sent
        for thread in threads:
            thread.start()
        if during is not None:
            threads.append(threading.Thread(target=watch, args=(during, made)))
            threads[-1].start()
        made.main(threads)
        for thread in threads:
            thread.join()
        signal.signal(signal.SIGINT, before)
        outcome = made.outcome
        stats = sup.stats()
    for tensor, block in untouched:
        if not (tensor.numpy() == block).all():
            outcome.wrong.append("a tensor that no request used has changed")
    if made.unended:
        outcome.wrong.append(f"{len(made.unended)} requests never ended")
    outcome.restarts, outcome.seconds = stats.restarts, time.monotonic() - began
    sup.device.close()
    return outcome


def watch(during: Callable[[Storm], None], made: Storm) -> None:
    try:
        during(made)
    finally:
        made.over.set()


def soak(device: str, seconds: float, seed: int) -> list[str]:
    """A storm by the clock with a fault about every two seconds; prints memory, and says what is wrong."""
    rows: list[tuple[float, float, float, int]] = []

    def watch(made: Storm) -> None:
        kinds = [*(HOST_FAULTS if made.sup.device.is_host else GPU_FAULTS), *FAULTS]
        began = time.monotonic()
        rng = np.random.default_rng(seed)
        ended = 0
        for number in itertools.count():
            for _ in range(INTERRUPTS):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if made.over.wait(2.0 / INTERRUPTS) or time.monotonic() - began > seconds:
                    return
            if made.outcome.requests < ended + BETWEEN:  # a slow machine is let recover from one fault before another
                continue
            ended = made.outcome.requests
            made.faults[next(made.tickets) + 5 * CLIENTS] = kinds[int(rng.integers(len(kinds)))]
            if number % 10 == 0:
                used = made.sup.device.bytes_in_use() or 0
                rows.append((time.monotonic() - began, resident(), used / 2**20, made.outcome.requests))
                print("{:6.0f} s  {:8.1f} MiB resident  {:8.1f} MiB of tensors  {:9d} requests".format(*rows[-1]))

    outcome = storm(device, seed, None, {}, watch)
    print(f"{outcome.requests} requests, {outcome.restarts} restarts, faults {dict(outcome.faults)}")
    print(f"{outcome.mains} requests of the main thread, which was interrupted {outcome.interrupts} times")
    print(dict(outcome.ended))
    settled = [row[1] for row in rows[len(rows) // 4 :]]
    grown = settled[-1] - settled[0] if len(settled) > 1 else 0.0
    print(f"memory grew by {grown:.1f} MiB over the last three quarters")
    return outcome.wrong + ([f"memory grew by {grown:.1f} MiB"] if grown > 16 else [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="host", help="host (default) or cuda:0")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    __import__("trouble")
    findings = soak(options.device, options.seconds, options.seed)
    sys.exit("\n".join(findings) or 0)
