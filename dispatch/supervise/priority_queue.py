"""PriorityQueue: a worker's queue once a request has a priority or dependencies; until then it is a plain deque.

pool.py replaces a queue's deque by a PriorityQueue, which keeps that deque as its middle level. Workers and supervisors
use both in the same way. It does not depend on workers or streams: a callback says whether a request may start.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from dispatch.supervise.future import ConditionalFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dispatch.supervise.future import Future

__all__ = ["PRIORITIES", "PriorityQueue"]

PRIORITIES = (-1, 0, 1)  # as with CUDA's streams, the smaller number goes first
# The order in which levels are tried, by the number of the call. Every eighth take starts at another level, so that no
# level starves.
ORDERS = ((0, 1, 2),) * 7 + ((1, 2, 0),) + ((0, 1, 2),) * 7 + ((2, 1, 0),)


class PriorityQueue:
    """Three queues with the interface of one deque; `may_start` says whether a future with dependencies may start now.

    Guarantees: within a level the order is that of submission, so a future that may not start yet blocks those behind
    it. A request depends only on earlier ones. So the earliest waiting request may start, and it is the first of its
    level: at least one worker can always continue. `bool(queue)` is true if `popleft` can take a future now; `len`
    counts all of them.
    """

    __slots__ = ("_levels", "_lock", "_may_start", "_turn")

    def __init__(self, middle: deque[Future], may_start: Callable[[ConditionalFuture], bool] | None) -> None:
        self._levels: tuple[deque[Future], deque[Future], deque[Future]] = (deque(), middle, deque())
        self._may_start = may_start
        self._lock = threading.Lock()  # held while taking; adding needs no lock
        self._turn = 0

    def append(self, future: Future) -> None:
        self._levels[1].append(future)

    def extend(self, futures: Iterable[Future]) -> None:
        self._levels[1].extend(futures)

    def put(self, futures: Iterable[Future], priority: int) -> None:
        """Add futures at a level."""
        self._levels[priority - PRIORITIES[0]].extend(futures)

    def popleft(self) -> Future:
        """Take the next future that may start; IndexError if there is none."""
        with self._lock:
            level = self._next()
            self._turn = (self._turn + 1) % len(ORDERS)
            return level.popleft()

    def first(self) -> Future:
        """The future that `popleft` would take, without taking it; IndexError if there is none."""
        return self._next()[0]

    def remove(self, future: Future) -> None:
        """Remove a future, which is near the start of its level; ValueError if it is not in the queue."""
        with self._lock:
            self._turn = (self._turn + 1) % len(ORDERS)
            self._level_of(future).remove(future)

    def oldest(self) -> Future:
        """The oldest future of the lowest priority, whether it may start or not; IndexError if there is none."""
        for level in reversed(self._levels):
            if level:
                first: Future = level[0]
                return first
        raise IndexError("nothing waits")

    def release(self) -> None:
        """Let all futures be taken from now on, because they will only be ended."""
        self._may_start = None

    def hold(self, may_start: Callable[[ConditionalFuture], bool]) -> None:
        """Undo `release`: dependencies count again."""
        self._may_start = may_start

    def clear(self) -> None:
        for level in self._levels:
            level.clear()

    def _next(self) -> deque[Future]:
        for index in ORDERS[self._turn]:
            level = self._levels[index]
            if self._is_open(level):
                return level
        raise IndexError("no request that may start")

    def _level_of(self, future: Future) -> deque[Future]:
        for level in self._levels:
            if future in level:
                return level
        raise ValueError("it was removed")

    def _is_open(self, level: deque[Future]) -> bool:
        try:
            first = level[0]
        except IndexError:
            return False
        may_start = self._may_start
        return may_start is None or not isinstance(first, ConditionalFuture) or may_start(first)

    def __bool__(self) -> bool:
        return any(map(self._is_open, self._levels))

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def __iter__(self) -> Iterator[Future]:
        for level in self._levels:
            yield from level
