"""PriorityQueue: a worker's queue once a request has a priority or waits for others; before that a plain deque does.

pool.py puts one in place of a queue's deque, which stays its middle level; workers and supervisors use both alike. It
knows nothing of workers and streams: whether a request may start is asked of its future.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from dispatch.supervise.future import LateFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dispatch.supervise.future import Future

__all__ = ["PRIORITIES", "PriorityQueue"]

PRIORITIES = (-1, 0, 1)  # as with CUDA's streams, the smaller number goes first
# Which level is looked at first, second and third, by the number of the take. Every eighth begins elsewhere, so that
# no level waits for ever behind the others.
ORDERS = ((0, 1, 2),) * 7 + ((1, 2, 0),) + ((0, 1, 2),) * 7 + ((2, 1, 0),)


class PriorityQueue:
    """Three queues that look like one deque; `may_start` says whether a future that waits for others may start now.

    Guarantees: within a level the order is that of submission: what may not start yet holds up what is behind it. As a
    request waits only for earlier ones, the earliest of all that wait may start, and it is the first of its level: so
    there is always one worker that can go on. True is what has something to take, which `len` does not say.
    """

    __slots__ = ("_levels", "_lock", "_may_start", "_turn")

    def __init__(self, middle: deque[Future], may_start: Callable[[LateFuture], bool] | None) -> None:
        self._levels: tuple[deque[Future], deque[Future], deque[Future]] = (deque(), middle, deque())
        self._may_start = may_start
        self._lock = threading.Lock()  # for those who take; who adds needs none
        self._turn = 0

    def append(self, future: Future) -> None:
        self._levels[1].append(future)

    def extend(self, futures: Iterable[Future]) -> None:
        self._levels[1].extend(futures)

    def put(self, futures: Iterable[Future], priority: int) -> None:
        """Add futures at a level."""
        self._levels[priority - PRIORITIES[0]].extend(futures)

    def popleft(self) -> Future:
        """The next one that may start; IndexError where there is none."""
        with self._lock:
            level = self._next()
            self._turn = (self._turn + 1) % len(ORDERS)
            return level.popleft()

    def first(self) -> Future:
        """What `popleft` would give, which stays; IndexError where there is none."""
        return self._next()[0]

    def remove(self, future: Future) -> None:
        """Take out a future, which is near the beginning of its level; ValueError where it is gone."""
        with self._lock:
            self._turn = (self._turn + 1) % len(ORDERS)
            self._level_of(future).remove(future)

    def oldest(self) -> Future:
        """The oldest of the lowest level that has any, whether it may start or not; IndexError where there is none."""
        for level in reversed(self._levels):
            if level:
                first: Future = level[0]
                return first
        raise IndexError("nothing waits")

    def release(self) -> None:
        """From now on nothing holds anything up: what is left is only taken to be ended."""
        self._may_start = None

    def hold(self, may_start: Callable[[LateFuture], bool]) -> None:
        """Undo `release`: what waits for others is held up again."""
        self._may_start = may_start

    def clear(self) -> None:
        for level in self._levels:
            level.clear()

    def _next(self) -> deque[Future]:
        for index in ORDERS[self._turn]:
            level = self._levels[index]
            if self._is_open(level):
                return level
        raise IndexError("nothing that may start")

    def _level_of(self, future: Future) -> deque[Future]:
        for level in self._levels:
            if future in level:
                return level
        raise ValueError("it has been taken out")

    def _is_open(self, level: deque[Future]) -> bool:
        try:
            first = level[0]
        except IndexError:
            return False
        may_start = self._may_start
        return may_start is None or not isinstance(first, LateFuture) or may_start(first)

    def __bool__(self) -> bool:
        return any(map(self._is_open, self._levels))

    def __len__(self) -> int:
        return sum(map(len, self._levels))

    def __iter__(self) -> Iterator[Future]:
        for level in self._levels:
            yield from level
