"""An asyncio service over a supervisor, which never takes more than it can do: backpressure, timeouts, cancellation.

Many clients send requests at once. If the queue is full, the client gets an error immediately, waits, retries, and
gives up in the end. An answer that takes too long is dropped; a client that leaves cancels its request. All answers
are checked.

    python examples/08_serve_asyncio.py --device cuda:0
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from typing import Literal

import numpy as np

import dispatch as dp
from dispatch.errors import DeadlineExceeded, QueueFull

CLIENTS, QUESTIONS = 64, 16
WIDTH, OUT, ROWS = 256, 128, 8
QUEUE = 16  # requests that may wait for each of two workers; there are more clients
PATIENCE = 30.0  # seconds that an answer may take, on a busy machine
PAUSE, TRIES = 0.0005, 16  # seconds before a client retries, doubled each time; and the number of tries


class Service:
    """gelu(x · weights + bias) for all clients; overload is reported as an answer, too."""

    def __init__(self, sup: dp.Supervisor, rng: np.random.Generator) -> None:
        self.sup, self.counts = sup, Counter[str]()
        self.weights, self.bias = (rng.standard_normal(shape, dtype=np.float32) for shape in [(WIDTH, OUT), (OUT,)])
        self._weights, self._bias = sup.device.array(self.weights), sup.device.array(self.bias)

    async def answer(self, x: np.ndarray, timeout: float) -> np.ndarray:
        """The answer; QueueFull at once if too many wait, DeadlineExceeded or TimeoutError if it takes too long.

        The deadline is part of the request, so that no worker starts a request that nobody waits for any more.
        """
        request = dp.MatmulRequest(
            self.sup.device.array(x), self._weights, bias=self._bias, epilogue=dp.Epilogue.GELU_BIAS
        )
        future = self.sup.submit(request, timeout=timeout)
        try:
            return (await asyncio.wait_for(future, timeout)).numpy()
        except (asyncio.TimeoutError, asyncio.CancelledError):
            future.add_done_callback(unheard)  # it may have started: nobody waits for its outcome any more
            raise

    def right(self, x: np.ndarray, answer: np.ndarray) -> float:
        """The largest error of an answer, against float64."""
        y = x.astype(np.float64) @ self.weights + self.bias
        expected = y / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        return float(np.abs(answer - expected).max() / np.abs(expected).max())


def unheard(future: dp.Future) -> None:
    """Retrieve an outcome that nobody waits for: otherwise the supervisor raises it at the end."""
    if not future.cancelled():
        future.exception()


async def ask(service: Service, x: np.ndarray, timeout: float) -> np.ndarray | None:
    """One request of a client, which retries if the service is full; None if it gave up."""
    for tries in range(TRIES):
        try:
            return await service.answer(x, timeout)
        except QueueFull:  # noqa: PERF203
            service.counts["told to wait"] += 1
            await asyncio.sleep(PAUSE * 2**tries)
    return None


async def client(service: Service, seed: int) -> tuple[list[float], float]:
    """Send all requests, one after the other; returns the time of each answer, and the largest error."""
    rng = np.random.default_rng(seed)
    seconds, worst = [], 0.0
    for number in range(QUESTIONS):
        x = rng.standard_normal((ROWS, WIDTH), dtype=np.float32)
        timeout = 1e-6 if number == 5 else PATIENCE  # no answer can be that fast
        began = time.perf_counter()
        try:
            answer = await ask(service, x, timeout)
        except (asyncio.TimeoutError, DeadlineExceeded):
            service.counts["too late"] += 1
            continue
        seconds.append(time.perf_counter() - began)
        service.counts["refused" if answer is None else "answered"] += 1
        if answer is not None:
            worst = max(worst, service.right(x, answer))
    return seconds, worst


async def leaver(service: Service, seed: int) -> None:
    """A client that sends a request and leaves before it has an answer."""
    x = np.random.default_rng(seed).standard_normal((ROWS, WIDTH), dtype=np.float32)
    task = asyncio.create_task(ask(service, x, PATIENCE))
    await asyncio.sleep(0)  # the request is sent
    task.cancel()
    try:
        await task
        service.counts["answered before leaving"] += 1
    except asyncio.CancelledError:
        service.counts["left"] += 1


async def serve(sup: dp.Supervisor) -> int:
    """Run all clients at once; 1 if an answer is wrong or a request has no outcome."""
    service = Service(sup, np.random.default_rng(0))
    began = time.perf_counter()
    clients = [client(service, seed) for seed in range(CLIENTS)]
    leavers = [leaver(service, CLIENTS + seed) for seed in range(CLIENTS)]
    results = await asyncio.gather(*clients, *leavers)
    elapsed = time.perf_counter() - began
    seconds = np.array([value for result in results[:CLIENTS] for value in result[0]])
    worst = max(result[1] for result in results[:CLIENTS])
    counts = service.counts
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    p50, p99 = np.percentile(seconds, [50, 99])
    rate = f"{counts['answered'] / elapsed:,.0f} answers a second"
    print(f"{rate}; half of them within {p50 * 1e3:.2f} ms, 99% within {p99 * 1e3:.2f} ms")
    print(f"largest error {worst:.1e}")
    ends = sum(counts[name] for name in ("answered", "refused", "too late"))
    return 0 if worst < 1e-5 and ends == CLIENTS * QUESTIONS and counts["answered"] > ends / 2 else 1


async def run(name: str | None, isolation: Literal["thread", "process"]) -> int:
    """Serve on a supervisor with short queues; it is created on a thread, so that the event loop is not blocked."""
    supervisor = asyncio.to_thread(
        dp.Supervisor, name, streams=2, isolation=isolation, queue_size=QUEUE, when_full="raise"
    )
    async with await supervisor as sup:
        return await serve(sup)


def main() -> int:
    """Run the service; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--isolation", default="thread", choices=["thread", "process"], help="where the workers live")
    options = parser.parse_args()
    name = None if options.device == "auto" else options.device
    return asyncio.run(run(name, options.isolation))


if __name__ == "__main__":
    sys.exit(main())
