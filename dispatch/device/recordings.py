"""Recordings of CUDA graphs under way on a device, and the calls that would end them all."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LOST", "Recordings"]

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
        self._recording: list[int] = []  # the threads that are
        self._losing: list[int] = []  # those that are at a call that ends recordings

    @contextmanager
    def one(self) -> Iterator[None]:
        """Record in here."""
        me = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: me in self._recording or all(thread == me for thread in self._losing))
            self._recording.append(me)
        try:
            yield
        finally:
            with self._changed:
                self._recording.remove(me)
                self._changed.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """Make calls in here that end captures."""
        me = threading.get_ident()
        with self._changed:
            self._losing.append(me)
            self._changed.notify_all()
        try:
            with self._changed:
                self._changed.wait_for(lambda: all(thread in self._losing for thread in self._recording))
            yield
        finally:
            with self._changed:
                self._losing.remove(me)
                self._changed.notify_all()
