"""Placement: which worker's queue a request goes to, and how many of several go where.

supervisor.py asks, with the queues that are allowed. Nothing here is locked, and nothing is queued.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dispatch.supervise.queue import WorkerQueue

__all__ = ["place", "shares"]


def place(ticket: int, seats: list[WorkerQueue]) -> WorkerQueue:
    """The seat with the least to do; in turn among equals."""
    best = seats[ticket % len(seats)]
    least = len(best.items) + best.busy
    if least:
        for seat in seats:
            load = len(seat.items) + seat.busy
            if load < least:
                best, least = seat, load
    return best


def shares(count: int, seats: list[WorkerQueue]) -> list[tuple[WorkerQueue, int]]:
    """How many of `count` requests go where, so that all have as much to do as they can; no more than fit."""
    loads = {seat: len(seat.items) + seat.busy for seat in seats}
    lower = [seat for seat in seats if len(seat.items) < seat.limit]  # one that is full may have the least to do
    while lower:
        level = -(-(count + sum(loads[seat] for seat in lower)) // len(lower))
        below = [seat for seat in lower if loads[seat] <= level]
        if len(below) == len(lower):
            break
        lower = below
    shares = []
    for seat in lower:
        share = min(level - loads[seat], count, max(seat.limit - len(seat.items), 0))
        count -= share
        if share:
            shares.append((seat, share))
    return shares
