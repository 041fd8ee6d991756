"""Stats: the counts and latencies of a supervisor at about this moment, read from its pool without stopping it.

supervisor.py returns them to users, status_server.py sends them to `python -m dispatch top`. The workers count; this
module only reads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.supervise.pool import WorkerPool

__all__ = ["Stats", "WorkerStats", "describe_supervisor", "read_stats"]


@dataclass(frozen=True)
class WorkerStats:
    """Counts of one worker's requests."""

    queued: int
    running: int
    done: int
    failed: int
    cancelled: int


@dataclass(frozen=True)
class Stats:
    """Counts of a supervisor's requests, and quantiles of the seconds from `submit` to the end of every 64th request.

    `workers` has the same counts by worker, without requests that were dropped from a full queue. `relocation` counts,
    over the plans on a GPU's streams, the calls that are launched as graphs at any addresses ("relocated") and the
    "bytes" of their parameters, those that stay with their library's call ("refused"), and later calls that were
    compared with the library's ("checked") and "differed"; it is empty on the host and for workers in child processes.
    `bytes_in_use` is the memory of the device's tensors; None on the host with threads, where NumPy owns it.
    `generation` is the number of the present child.
    """

    queued: int
    running: int
    done: int
    failed: int
    cancelled: int
    restarts: int
    generation: int
    bytes_in_use: int | None
    p50: float | None
    p90: float | None
    p99: float | None
    relocation: dict[str, int]
    workers: tuple[WorkerStats, ...]


def read_stats(pool: WorkerPool) -> Stats:
    """The present counts of a pool's queues and samples, which may change while they are read."""
    workers = tuple(
        WorkerStats(len(queue.pending), queue.busy, queue.done, queue.failed, queue.cancelled) for queue in pool.queues
    )
    latencies = sorted(pool.latencies.copy())  # copied atomically: a deque must not grow during iteration
    p50, p90, p99 = (latencies[int(share * len(latencies))] if latencies else None for share in (0.5, 0.9, 0.99))
    return Stats(
        queued=sum(worker.queued for worker in workers),
        running=sum(worker.running for worker in workers),
        done=sum(worker.done for worker in workers),
        failed=sum(worker.failed for worker in workers) + pool.dropped,
        cancelled=sum(worker.cancelled for worker in workers) + pool.withdrawn,
        restarts=pool.restarts,
        generation=pool.generation,
        bytes_in_use=pool.device.bytes_in_use(),
        p50=p50,
        p90=p90,
        p99=p99,
        relocation=_relocation(pool),
        workers=workers,
    )


def describe_supervisor(pool: WorkerPool, broken: int) -> str:
    """A supervisor on one line: its device, its workers, how many requests are queued, and whether it takes more."""
    state = "" if pool.refusal is None else ", broken" if pool.cooling_down or pool.state == broken else ", closed"
    waiting = sum(len(queue.pending) for queue in pool.queues)
    return f"<Supervisor of {pool.device}, {len(pool.queues)} workers, {waiting} requests queued{state}>"


def _relocation(pool: WorkerPool) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for queue in pool.queues:
        executor = None if queue.worker is None else queue.worker.executor
        if executor is not None:
            counts.update(executor.relocation_stats())
    return dict(counts)
