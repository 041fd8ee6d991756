"""Mixed requests from many clients, with faults among them at seeded moments: what must hold whatever happens.

The tests call `storm` with a number of requests, on the host and on a GPU. For a soak run it by the clock:
`python tests/chaos.py --device cuda:0 --seconds 600`, which prints memory over time and fails where it grows.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import dispatch as dp
from dispatch.errors import (
    DeadlineExceeded,
    DeviceFault,
    HookFailed,
    OutOfMemory,
    QueueFull,
    TaintedTensor,
    WorkerFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

N = 16  # extent of the products
CLIENTS, TASKS = 8, 16  # threads, and tasks of one asyncio loop
WINDOW = 16  # requests that a thread has in flight
QUEUE = 128  # requests that may wait for each of the workers
PATIENCE = 120  # seconds: longer is a deadlock
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
    "raise": WorkerFailed,
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


class Client:
    """One thread's requests in flight, each with what must come of it."""

    def __init__(self, storm: Storm, rng: np.random.Generator) -> None:
        self.storm, self.rng = storm, rng
        dev = storm.sup.device
        self.slots = deque(dev.array(np.full((N, N), np.nan, np.float32)) for _ in range(WINDOW + 1))
        self.copies = deque(dev.array(np.full(64, np.nan, np.float32)) for _ in range(WINDOW + 1))
        self.sum = dev.zeros((N, N))
        self.total = np.zeros((N, N))
        self.flying: deque[tuple[str, dp.Future, Any]] = deque()  # kind, future, right result

    def send(self, ticket: int) -> None:
        kind = ("product", "fresh", "copy", "sum")[int(self.rng.integers(4))]
        a, b, right = self.storm.pairs[int(self.rng.integers(len(self.storm.pairs)))]
        if kind == "product":
            self.slots.rotate()
            self.slots[0].copy_from(np.full((N, N), np.nan, np.float32))
            request: Any = dp.MatmulRequest(a, b, out=self.slots[0])
        elif kind == "fresh":
            request = dp.MatmulRequest(a, b)
        elif kind == "copy":
            self.copies.rotate()
            self.copies[0].copy_from(np.full(64, np.nan, np.float32))
            request = sys.modules["trouble"].Trouble("fine", self.storm.source, self.copies[0])
            right = self.storm.vector
        else:
            self.settle(0)  # it reads what it writes: alone, so that its value is known
            request = dp.MatmulRequest(a, b, c=self.sum, beta=1.0, out=self.sum)
            self.settle_sum(self.storm.submit(ticket, request), right)
            return
        self.flying.append((kind, self.storm.submit(ticket, request), right))
        self.settle(WINDOW)

    def settle_sum(self, future: dp.Future, right: Any) -> None:
        """End the sum; where it could not be repeated, what it wrote must not be readable before it is overwritten."""
        error = future.exception(PATIENCE)
        self.storm.count("sum", error)
        if error is None:
            self.total = self.total + right
            if not is_close(self.sum.numpy(), self.total):
                self.storm.wrong("a sum is not right")
        elif not isinstance(error, DeviceFault) or "cannot be run again" not in str(error):
            self.storm.wrong(f"a sum ended in {error!r}")
        else:
            try:
                self.sum.numpy()
                self.storm.wrong("what may be half written was read")
            except TaintedTensor:
                self.total = np.zeros((N, N))
                self.sum.copy_from(self.total)

    def settle(self, left: int) -> None:
        """Wait for the oldest, until only so many are left."""
        while len(self.flying) > left:
            kind, future, right = self.flying.popleft()
            error = future.exception(PATIENCE)
            self.storm.count(kind, error)
            if error is not None:
                self.storm.wrong(f"a {kind}, which could be repeated, ended in {error!r}")
            elif not is_close(future.result().numpy(), right):
                self.storm.wrong(f"a {kind} is not right")


def is_close(found: Any, right: Any) -> bool:
    """Sums of 16 products in f32, and up to thousands of those added up: far below what a lost product would make."""
    return bool(np.abs(found - right).max() <= 1e-3 * max(1.0, np.abs(right).max()))


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


def in_destructor(frame: Any) -> bool:
    """Whether a signal came in a destructor or a callback of a weak reference: what is raised there reaches nobody.

    The interpreter prints it and goes on, and what was to be given back is not.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or os.path.basename(code.co_filename) in ("weakref.py", "_weakrefset.py"):
            return True
        frame = frame.f_back
    return False


def first_free_descriptor() -> int:
    """The smallest number from 16 on that no open file has."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    return next(number for number in itertools.count(16) if number not in taken)


def addresses() -> int:
    """Bytes of addresses that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def children_of(thread: str) -> list[str]:
    """The processes that a thread of this process has started."""
    try:
        return Path(f"/proc/self/task/{thread}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it ended since it was listed
        return []


def targets() -> list[str]:
    """What the descriptors of this process lead to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or another thread's, is closed by now
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


def named_shared_memory() -> set[str]:
    """What this process holds or maps of /dev/shm, where all processes of the machine make and remove files."""
    mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return {path for path in (*mapped, *targets()) if path.startswith("/dev/shm/")}


def left_over() -> dict[str, Any]:
    """What a process holds that a supervisor might leave behind."""
    gc.collect()
    children = [children_of(thread) for thread in os.listdir("/proc/self/task")]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(itertools.chain(*children)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memory files": sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "shared memory": sorted(named_shared_memory()),
    }


def left_behind(before: dict[str, Any]) -> dict[str, Any]:
    """What `left_over` says now and did not say before; what others, done by now, had left is no matter of ours."""
    now = left_over()
    more = {what: Counter(now[what]) - Counter(before[what]) for what in ("threads", "children", "shared memory")}
    found = {what: sorted(each.elements()) for what, each in more.items()}
    return {what: each for what, each in found.items() if each} | {
        what: (before[what], now[what]) for what in ("descriptors", "memory files") if now[what] > before[what]
    }


def resident() -> float:
    """MiB that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


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
