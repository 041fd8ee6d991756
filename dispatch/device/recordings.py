"""Recordings: excludes calls that would end every capture of the device while CUDA graphs are recorded."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LOST", "Recordings"]

CHECK_INTERVAL = 0.1  # seconds between checks of a waiting thread: an interrupted thread may not have notified it
LOST = range(900, 909)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and following: some call has ended a capture


class Recordings:
    """A lock between recordings (`record`, shared) and calls on the whole context that end captures (`exclude`).

    Guarantees: no block of `with recordings.record():` overlaps one of `with recordings.exclude():` of another thread.
    `exclude` waits for the active recordings, which are short, and no new one begins meanwhile. It does not wait
    for threads that are both recording and inside `exclude` (they ran out of memory): their recordings are lost
    anyway, and two such threads would wait for each other. A thread may also record inside its own `exclude`, as a
    finalizer does.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # its lock is reentrant: a finalizer may run inside it
        # The threads inside each kind of block. The key is an object that is unique to the block, so that leaving is
        # safe at any Ctrl-C, before or after the entry was added.
        self._recording: dict[object, int] = {}
        self._losing: dict[object, int] = {}

    @contextmanager
    def record(self) -> Iterator[None]:
        """A block in which to record."""
        me, block = threading.get_ident(), object()
        try:
            with self._changed:
                self._wait_until(lambda: me in self._recording.values() or {me}.issuperset(self._losing.values()))
                self._recording[block] = me
            yield
        finally:
            self._recording.pop(block, None)
            with self._changed:
                self._changed.notify_all()

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """A block in which to make calls that end captures."""
        me, block = threading.get_ident(), object()
        try:
            self._losing[block] = me
            with self._changed:
                self._changed.notify_all()
                self._wait_until(lambda: {*self._losing.values()}.issuperset(self._recording.values()))
            yield
        finally:
            self._losing.pop(block, None)
            with self._changed:
                self._changed.notify_all()

    def _wait_until(self, may_go_on: Callable[[], bool]) -> None:
        while not self._changed.wait_for(may_go_on, CHECK_INTERVAL):
            pass
