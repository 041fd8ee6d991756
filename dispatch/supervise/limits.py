"""Limits: what is taken for a time in seconds, and how often the workers of one supervisor may break.

supervisor.py and future.py check what users give; pool.py and isolate/pool.py ask before they put something new in the
place of what broke. Nothing here waits or starts anything.
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
FIRST_DELAY, LAST_DELAY = 0.05, 2.0  # seconds before another start, after one that failed and after many


def check_seconds(name: str, given: Any, least: float = 0.0, *, above: bool = False) -> float:
    """A time as a number; BadRequest for what is none, is not finite, or is less than `least` (`above`: or equal)."""
    if isinstance(given, Real) and not isinstance(given, bool):
        try:
            seconds = float(given)
        except OverflowError:  # an integer beyond all floats
            seconds = math.inf
        if math.isfinite(seconds) and (seconds > least if above else seconds >= least):
            return min(seconds, LONGEST)
    wanted = "a finite number of seconds"
    if least > -math.inf:
        wanted += f" above {least:g}" if above else f", {least:g} or more"
    raise BadRequest(name, shown(given), wanted)


class RestartLimit:
    """At most `max_restarts` in `max_seconds`, and what comes after: the circuit opens, for good or for a while.

    Guarantees: not more than `max_restarts` starts in a row fail before the circuit opens, however long each takes. An
    open circuit that half-opens has spent its restarts: one break within `max_seconds` opens it again at once.
    Who calls holds the pool's lock.
    """

    def __init__(self, max_restarts: int, max_seconds: float, cooldown: float | None) -> None:
        self.max_restarts, self.max_seconds, self.cooldown = max_restarts, max_seconds, cooldown
        self._breaks: deque[float] = deque()
        self._failed_starts = 0

    def count(self, *, failed_start: bool = False) -> bool:
        """Take note of a break, or of a start that failed; whether another start is within the limit."""
        now = monotonic()
        self._breaks.append(now)
        while self._breaks[0] < now - self.max_seconds:
            self._breaks.popleft()
        self._failed_starts += failed_start
        return max(len(self._breaks), self._failed_starts) <= self.max_restarts

    def started(self) -> None:
        """What was started is ready."""
        self._failed_starts = 0

    def half_open(self) -> None:
        """The circuit has been open for its cooldown: one more try."""
        self._breaks = deque([monotonic()] * self.max_restarts)
        self._failed_starts = self.max_restarts

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start: none after a break, ever longer after starts that failed."""
        if not self._failed_starts:
            return 0.0
        return min(FIRST_DELAY * 2.0 ** min(self._failed_starts - 1, 16), LAST_DELAY)

    def words(self) -> str:
        """How often what was kept has broken, for the message of an open circuit."""
        if self._failed_starts > self.max_restarts:
            times = f"{self._failed_starts} starts in a row failed"
        else:
            times = f"{len(self._breaks)} times in {self.max_seconds:g} s"
        after = "" if self.cooldown is None else f", cooldown={self.cooldown:g}"
        return f"{times} (max_restarts={self.max_restarts}{after})"

    def advice(self) -> str:
        """What to do when the circuit is open."""
        if self.cooldown is None:
            return "make a new supervisor"
        return f"it is tried again {self.cooldown:g} s after that"
