"""Leaving the block of a supervisor: raises the errors that were never read; in asyncio, without blocking the loop.

supervisor.py calls this; pool.py does the work and waits in plain locks, so `async with` waits on another thread.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from dispatch.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.errors import Undelivered
    from dispatch.supervise.journal import Journal
    from dispatch.supervise.pool import WorkerPool
    from dispatch.supervise.status_server import StatusServer

__all__ = ["abandon_pool", "close_in_thread", "close_observers", "raise_undelivered", "refuse_closed"]


def raise_undelivered(undelivered: Undelivered | None, error: BaseException | None) -> None:
    """Raise the errors that were never read, or attach them to the exception that leaves the block."""
    if undelivered is None:
        return
    if error is None:
        raise undelivered from undelivered.exceptions[0]
    add_note = getattr(error, "add_note", None)  # Python 3.11
    if add_note is not None:
        add_note(f"Undelivered: {undelivered}")
    end: BaseException = error
    while end.__context__ is not None and end.__context__ is not undelivered:
        end = end.__context__
    if end is not undelivered:
        end.__context__ = undelivered


def refuse_closed(pool: WorkerPool) -> None:
    """Closed if a supervisor's block is entered after it was closed."""
    if isinstance(pool.refusal, Closed):
        pool.check()


def abandon_pool(pool: WorkerPool) -> None:
    """End the pool of a supervisor that was not closed. Ctrl-C in here is swallowed, and must not leave a thread."""
    try:
        pool.abandon()
    except BaseException:
        pool.abandon()
        raise


def close_observers(server: StatusServer | None, journal: Journal | None, *, wait: bool) -> None:
    """Close the status server and the journal."""
    if server is not None:
        server.close(wait)
    if journal is not None:
        journal.close(wait)


async def close_in_thread(close: Callable[[bool], Undelivered | None], name: str) -> Undelivered | None:
    """Call `close(True)` on a separate thread; those of the loop's executor may all be waiting for requests.

    If the waiting task is cancelled, queued requests still run, and the interpreter does not exit before they have.
    Errors that were never read then go to `threading.excepthook`, or to the loop's exception handler.
    """
    closing = AsyncClose(close)
    thread = threading.Thread(target=closing.run, name=f"dispatch {name} closing")
    try:
        thread.start()
    except RuntimeError:  # no thread can be started: better block the loop than not wait
        return close(True)
    except BaseException:  # Ctrl-C: the thread may be running
        closing.abandon()
        raise
    return await closing.wait()


class AsyncClose:
    """Closes a supervisor on another thread, while a task of the loop waits.

    Guarantees: the outcome of `close` reaches the waiting task, or is reported by `abandon` or `run`, once.
    """

    def __init__(self, close: Callable[[bool], Undelivered | None]) -> None:
        import asyncio

        self._close = close
        self._loop = asyncio.get_running_loop()
        self._waiter = self._loop.create_future()
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._undelivered: Undelivered | None = None
        self._error: BaseException | None = None  # an error here is a defect of this library

    def run(self) -> None:
        """On the thread: close, and wake the waiting task."""
        undelivered = error = None
        try:
            undelivered = self._close(True)
        except BaseException as found:  # noqa: BLE001  # raised by `wait`
            error = found
        with self._lock:
            self._undelivered, self._error = undelivered, error
            is_abandoned = self._is_abandoned
        if not is_abandoned:
            try:
                self._loop.call_soon_threadsafe(self._wake)
            except RuntimeError:  # the loop is closed
                is_abandoned = True
        if is_abandoned:
            _raise_outcome(undelivered, error)

    def _wake(self) -> None:
        if not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> Undelivered | None:
        """On the loop: wait, and return the errors that were never read."""
        try:
            await self._waiter
        except BaseException:
            self.abandon()
            raise
        if self._error is not None:
            raise self._error
        return self._undelivered

    def abandon(self) -> None:
        """Stop waiting; report an outcome that is there already."""
        with self._lock:
            self._is_abandoned = True
            outcome = self._undelivered or self._error
        if outcome is not None:
            context: dict[str, Any] = {
                "message": "a supervisor was closed without waiting for it",
                "exception": outcome,
            }
            self._loop.call_exception_handler(context)


def _raise_outcome(undelivered: Undelivered | None, error: BaseException | None) -> None:
    if error is not None:
        raise error
    raise_undelivered(undelivered, None)
