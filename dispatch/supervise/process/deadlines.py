"""Deadlines: the requests that were submitted with a timeout, ordered by their deadlines.

sending.py adds a request that stays in its queue, and any before it is sent; the pool's monitor thread checks which
deadlines have passed, and decides what happens then.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.supervise.future import TimedFuture

__all__ = ["Deadlines"]


class Deadlines:
    """A heap of deadlines.

    Guarantees: a request may be added twice, before and after an interrupt; it is handled once.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Any, TimedFuture]] = []  # the second item makes the order total
        self._lock = threading.Lock()
        self._entries = itertools.count()

    def add(self, future: TimedFuture, queue: Any) -> None:
        with self._lock:
            heapq.heappush(self._heap, (future.deadline, next(self._entries), queue, future))

    def seconds_left(self, longest: float) -> float:
        """Seconds until the first deadline of a request that has not ended, at most `longest`."""
        with self._lock:
            while self._heap and self._heap[0][3]._status:
                heapq.heappop(self._heap)
            return min(self._heap[0][0] - monotonic(), longest) if self._heap else longest

    def due(self, now: float) -> tuple[TimedFuture, Any] | None:
        """A request that is past its deadline and has not ended, and its queue; it stays until `pop`."""
        with self._lock:
            while self._heap and self._heap[0][0] <= now:
                _, _, queue, future = self._heap[0]
                if not future._status:
                    return future, queue
                heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove what `due` returned."""
        with self._lock:
            heapq.heappop(self._heap)
