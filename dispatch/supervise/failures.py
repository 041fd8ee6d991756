"""Failures: the failed futures of one supervisor whose errors were not read yet, and the errors of callbacks.

Closing the supervisor raises the errors that are still here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dispatch.errors import Undelivered
from dispatch.supervise.future import DELIVERED, FAILED

if TYPE_CHECKING:
    from dispatch.supervise.future import Future

__all__ = ["Failures"]

PRUNE = 1024  # with more futures than this, those whose errors were read are removed


class Failures:
    """Errors that may have to be raised by close(); any thread may add to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: list[Future] = []
        self._prune_at = PRUNE
        self._errors: list[BaseException] = []  # of callbacks

    def __len__(self) -> int:
        return len(self._futures)

    def keep(self, future: Future) -> None:
        """Keep a future that fails or is about to; called first if Ctrl-C may come in between."""
        with self._lock:
            self._futures.append(future)
            if len(self._futures) >= self._prune_at:
                self._futures = _unread(self._futures)
                self._prune_at = max(PRUNE, 2 * len(self._futures))

    def add_errors(self, errors: list[BaseException]) -> None:
        """Keep errors of callbacks; an interrupt in a callback on the main thread is raised there at once."""
        if not errors:
            return
        is_main = threading.current_thread() is threading.main_thread()
        interrupts = [error for error in errors if is_main and not isinstance(error, Exception)]
        ordinary = [error for error in errors if error not in interrupts]
        with self._lock:
            self._errors += ordinary
        for error in interrupts:
            raise error

    def take(self) -> Undelivered | None:
        """All errors that were never read, as one; they count as read from now on. None if there are none."""
        with self._lock:
            failures, errors = self._futures, self._errors
            self._futures, self._errors = [], []
        futures = [future for future in dict.fromkeys(failures) if future._status == FAILED]
        errors = [future._value for future in futures] + errors
        for future in futures:
            future._status = DELIVERED
        return Undelivered(errors) if errors else None


# No loop with a condition inside a block that holds a lock: in Python 3.12 and 3.13 the jump back to its start is not
# covered by the exception table, so Ctrl-C there would leave the block without releasing the lock.
def _unread(failures: list[Future]) -> list[Future]:
    return [future for future in failures if future._status in (0, FAILED)]
