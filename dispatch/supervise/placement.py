"""Placement: which worker's queue a request goes to, and how a list of requests is divided.

supervisor.py calls it with the allowed queues. Nothing here takes a lock, and nothing is queued.

If a caller waits for each request before it submits the next, all of them go to one worker, not to all in turn. A
thread that has slept for 0.2 ms or longer takes longer to wake, because its CPU is in a deeper sleep state: on a
virtual machine a request to a child that had slept so long took 50 to 70 us, and 42 us to a child that had just
answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.supervise.pool import WorkerPool
    from dispatch.supervise.queue import WorkerQueue

__all__ = ["FEW", "place", "place_near", "shares"]

NEAR = 64  # a worker that has a request's plan gets it with up to this many requests queued there
FEW = 16  # and with up to this many queued and running there if another worker is idle


def place_near(ticket: int, known: WorkerQueue | None, pool: WorkerPool) -> WorkerQueue:
    """The queue for a request under "affine" placement.

    A request whose plan a worker has (`known`) goes to that worker, unless many requests wait there, or some wait while
    another worker is idle. A request whose plan no worker has goes to the same worker as the latest such request, if
    that worker is idle. All others go to the queue with the least to do.
    """
    if known is None:
        queue = pool.latest
        if not queue.is_idle:
            queue = pool.latest = place(ticket, pool.queues)
        return queue
    if len(known.pending) <= NEAR:
        for queue in pool.queues:  # with `any` it took three times as long
            if not queue.pending and not queue.busy and queue.is_idle:
                return queue
        return known
    return place(ticket, pool.queues)


def place(ticket: int, queues: list[WorkerQueue]) -> WorkerQueue:
    """The queue with the least to do; round-robin among equals."""
    best = queues[ticket % len(queues)]
    least = len(best.pending) + best.busy
    if least:
        for queue in queues:
            load = len(queue.pending) + queue.busy
            if load < least:
                best, least = queue, load
    return best


def shares(count: int, queues: list[WorkerQueue]) -> list[tuple[WorkerQueue, int]]:
    """How many of `count` requests each queue gets, so that loads are as equal as possible and no limit is exceeded."""
    loads = {queue: len(queue.pending) + queue.busy for queue in queues}
    lower = [queue for queue in queues if len(queue.pending) < queue.limit]  # a full one may have the least to do
    while lower:
        level = -(-(count + sum(loads[queue] for queue in lower)) // len(lower))
        below = [queue for queue in lower if loads[queue] <= level]
        if len(below) == len(lower):
            break
        lower = below
    result = []
    for queue in lower:
        share = min(level - loads[queue], count, max(queue.limit - len(queue.pending), 0))
        count -= share
        if share:
            result.append((queue, share))
    return result
