"""Recordings of CUDA graphs under way on a device, and the calls that would end them all."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LOST", "Recordings"]

LOOK = 0.1  # seconds: who waits looks by itself, for an interrupted thread may have told nobody
LOST = range(
    900, 909
)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and what follows: a capture was ended, by whatever it was


class Recordings:
    """The recordings under way on a device, and the calls that would end them all: those of the whole context.

    Guarantees: no block of `with recordings.one():` overlaps one of `with recordings.none():` of another thread.
    Whoever enters the second waits for the recordings under way, which are short, and no other begins meanwhile. One
    whose own thread has come to such a call (it ran out of memory) is waited for by nobody: it is lost by that anyway,
    and two such threads would wait for each other. Nor does a thread wait for itself that records within the second, as
    a finalizer may.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # of a lock that may be taken again: finalizers may come in between
        # The threads that are in a block of either, by an object of the block's own: Ctrl-C may come before it is in
        # here, and at once behind that.
        self._recording: dict[object, int] = {}
        self._losing: dict[object, int] = {}

    @contextmanager
    def one(self) -> Iterator[None]:
        """Record in here."""
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
    def none(self) -> Iterator[None]:
        """Make calls in here that end captures."""
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
        while not self._changed.wait_for(may_go_on, LOOK):
            pass
