"""Failures: the futures of one supervisor that failed and that nobody has asked, and what callbacks raised.

A failure is a value until somebody asks for it; what is left here when a supervisor is closed is raised then.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dispatch.errors import Undelivered
from dispatch.supervise.future import DELIVERED, FAILED

if TYPE_CHECKING:
    from dispatch.supervise.future import Future

__all__ = ["Failures"]

PRUNE = 1024  # failures, from which on those that were asked for are sorted out


class Failures:
    """What failed and may have to be delivered; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[Future] = []
        self._prune_at = PRUNE
        self._errors: list[BaseException] = []  # of callbacks

    def __len__(self) -> int:
        return len(self._futures)

    def keep(self, future: Future) -> None:
        """Keep a future that is about to fail, until somebody asks it; for those that can be interrupted after it."""
        with self._lock:
            self._futures.append(future)
            if len(self._futures) >= self._prune_at:
                self._futures = _unread(self._futures)
                self._prune_at = max(PRUNE, 2 * len(self._futures))

    def add_errors(self, errors: list[BaseException]) -> None:
        """Keep what callbacks raised, until the end; an interrupt of the main thread goes on there, at once."""
        if not errors:
            return
        is_main = threading.current_thread() is threading.main_thread()
        interrupts = [error for error in errors if is_main and not isinstance(error, Exception)]
        kept = [error for error in errors if error not in interrupts]
        with self._lock:
            self._errors += kept
        for error in interrupts:
            raise error

    def take(self) -> Undelivered | None:
        """What failed and nobody asked for, which is delivered herewith."""
        with self._lock:
            failures, errors = self._futures, self._errors
            self._futures, self._errors = [], []
        futures = [future for future in dict.fromkeys(failures) if future._status == FAILED]
        errors = [future._value for future in futures] + errors
        for future in futures:
            future._status = DELIVERED
        return Undelivered(errors) if errors else None


# Loops with a condition in them are no part of a block that holds a lock: Python 3.12 and 3.13 guard the jump back to
# their beginning by no handler, so that Ctrl-C there would leave the block without its end.
def _unread(failures: list[Future]) -> list[Future]:
    return [kept for kept in failures if kept._status in (0, FAILED)]
