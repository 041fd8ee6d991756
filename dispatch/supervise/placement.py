"""Placement: which worker's queue a request goes to, and how many of several go where.

supervisor.py asks, with the queues that are allowed. Nothing here is locked, and nothing is queued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.supervise.queue import WorkerQueue

__all__ = ["place", "shares"]


def place(ticket: int, queues: list[WorkerQueue]) -> WorkerQueue:
    """The queue with the least to do; in turn among equals."""
    best = queues[ticket % len(queues)]
    least = len(best.pending) + best.busy
    if least:
        for queue in queues:
            load = len(queue.pending) + queue.busy
            if load < least:
                best, least = queue, load
    return best


def shares(count: int, queues: list[WorkerQueue]) -> list[tuple[WorkerQueue, int]]:
    """How many of `count` requests go where, so that all have as much to do as they can; no more than fit."""
    loads = {queue: len(queue.pending) + queue.busy for queue in queues}
    lower = [queue for queue in queues if len(queue.pending) < queue.limit]  # one that is full may have the least to do
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
