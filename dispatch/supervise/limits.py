"""Limits: checks of times in seconds, and how often the workers of one supervisor may break.

supervisor.py and future.py check users' arguments with it; circuit.py and process/process_pool.py ask RestartLimit
before they restart something. Nothing here waits or starts anything.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from numbers import Real
from time import monotonic
from typing import Any

from dispatch.checks import shown
from dispatch.errors import BadRequest

__all__ = ["LONGEST", "RestartLimit", "check_seconds"]

LONGEST = threading.TIMEOUT_MAX  # seconds that the system can wait for, some 292 years
FIRST_DELAY, LAST_DELAY = 0.05, 2.0  # seconds before another start: after one failed start, and after many


def check_seconds(name: str, given: Any, least: float = 0.0, *, above: bool = False) -> float:
    """A time in seconds as a float; BadRequest unless it is finite and at least `least` (with `above`: greater)."""
    if isinstance(given, Real) and not isinstance(given, bool):
        try:
            seconds = float(given)
        except OverflowError:  # an integer beyond all floats
            seconds = math.inf
        if math.isfinite(seconds) and (seconds > least if above else seconds >= least):
            return min(seconds, LONGEST)
    expected = "a finite number of seconds"
    if least > -math.inf:
        expected += f" above {least:g}" if above else f", {least:g} or more"
    raise BadRequest(name, shown(given), expected)


class RestartLimit:
    """Counts restarts: after more than `max_restarts` in `max_seconds` the circuit opens, for good or for `cooldown`.

    Guarantees: at most `max_restarts` starts in a row fail before the circuit opens, however long each takes. After an
    open circuit has half-opened, a single break within `max_seconds` opens it again. The caller holds the pool's lock.
    """

    def __init__(self, max_restarts: int, max_seconds: float, cooldown: float | None) -> None:
        self.max_restarts, self.max_seconds, self.cooldown = max_restarts, max_seconds, cooldown
        self._breaks: deque[float] = deque()
        self._failed_starts = 0

    def count(self, *, failed_start: bool = False) -> bool:
        """Count a break, or a failed start; returns whether another start is within the limit."""
        now = monotonic()
        self._breaks.append(now)
        while self._breaks[0] < now - self.max_seconds:
            self._breaks.popleft()
        self._failed_starts += failed_start
        return max(len(self._breaks), self._failed_starts) <= self.max_restarts

    def started(self) -> None:
        """A start has succeeded: reset the count of failed starts."""
        self._failed_starts = 0

    def half_open(self) -> None:
        """The cooldown is over: allow one more start."""
        self._breaks = deque([monotonic()] * self.max_restarts)
        self._failed_starts = self.max_restarts

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: 0 after a break, doubling with each failed start."""
        if not self._failed_starts:
            return 0.0
        return min(FIRST_DELAY * 2.0 ** min(self._failed_starts - 1, 16), LAST_DELAY)

    def describe(self) -> str:
        """How often workers have broken, for the error of an open circuit."""
        if self._failed_starts > self.max_restarts:
            times = f"{self._failed_starts} consecutive starts failed"
        else:
            times = f"{len(self._breaks)} times in {self.max_seconds:g} s"
        after = "" if self.cooldown is None else f", cooldown={self.cooldown:g}"
        return f"{times} (max_restarts={self.max_restarts}{after})"

    def advice(self) -> str:
        """What to do when the circuit is open."""
        if self.cooldown is None:
            return "create a new supervisor"
        return f"the next attempt is {self.cooldown:g} s after the last failure"
