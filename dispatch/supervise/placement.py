"""Placement: which worker's queue a request goes to, and how a list of requests is divided.

supervisor.py calls it with the allowed queues. Nothing here takes a lock, and nothing is queued.

A sequence of requests, each waited for before the next is submitted, goes to one worker, not to all in turn. A thread
that has slept for 0.2 ms or longer wakes later, because its CPU sleeps more deeply: on a virtual machine a request to a
child that had slept so long took 50 to 70 us, and 42 to one that had just answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.supervise.pool import WorkerPool
    from dispatch.supervise.queue import WorkerQueue

__all__ = ["FEW", "place", "place_near", "shares"]

NEAR = 64  # requests queued at the worker that knows a request, up to which it gets it again
FEW = 16  # those queued and running there, up to which it does so while others have nothing to do


def place_near(ticket: int, known: WorkerQueue | None, pool: WorkerPool) -> WorkerQueue:
    """The queue for a request under "affine" placement.

    A request whose plan a worker has (`known`) goes there, unless many requests wait there, or some while another
    worker is idle. A request that no worker knows goes where the latest such one went, if that worker is idle. In all
    other cases it is the queue with the least to do.
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
    """How many of `count` requests each queue gets, so that loads become as equal as possible; no more than fit."""
    loads = {queue: len(queue.pending) + queue.busy for queue in queues}
    lower = [queue for queue in queues if len(queue.pending) < queue.limit]  # a full one may have the least to do
    while lower:
        level = -(-(count + sum(loads[queue] for queue in lower)) // len(lower))
        below = [queue for queue in lower if loads[queue] <= level]
        if len(below) == len(lower):
            break
        lower = below
    given = []
    for queue in lower:
        share = min(level - loads[queue], count, max(queue.limit - len(queue.pending), 0))
        count -= share
        if share:
            given.append((queue, share))
    return given
