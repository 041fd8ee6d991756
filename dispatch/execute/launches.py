"""How an executor launches graphs on its stream: with the interpreter's lock or without, and in which context."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from cudabind import driver
from dispatch.device.stream import NULL_CONTEXT, members, relaxed
from dispatch.execute.cuda_graph import launcher

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dispatch.device.stream import Stream

__all__ = ["Launches"]

HALF = 128  # launches, each of which memory may be allocated and freed with on the same stream
STREAMS = 16  # that many may have as much; of more, several share one of the driver's queues, and its room


class Launches:
    """The launches on one stream, which hold the interpreter's lock as long as the stream surely has room for them.

    Threads that let go of the lock for each launch wait for each other to have it back: 16 threads launched 0.43 of
    what one did (H100). But a launch that waits for room must not hold it (cudabind.driver.BOUNDED), which is so where
    about a thousand are outstanding on the streams that share one of the driver's queues. `left` counts down from far
    less; then it begins anew if the GPU is past where it began the time before. What is on other libraries' streams,
    nobody knows. Nor may a launch hold it while a profiler calls Python from threads of its own, which it may wait for.
    """

    __slots__ = ("__weakref__", "_event", "_stream", "_target", "left")

    used: ClassVar[WeakSet[Launches]] = WeakSet()  # those with graphs to launch
    observed: ClassVar[bool] = False  # by a profiler: no launch of any stream holds the lock

    def __init__(self, stream: Stream, target: ctypes.c_void_p) -> None:
        self._stream, self._target = stream, target
        self._event: ctypes.c_void_p | None = None  # behind the launches until `left` began
        self.left = 0 if self.observed else HALF

    @classmethod
    def observe(cls, observed: bool) -> None:
        """Have no launch hold the lock from now on, or as before."""
        cls.observed = observed
        if observed:
            for each in members(cls.used):
                each.left = 0

    def of(self, executable: ctypes.c_void_p, nodes: int, *, holds_gil: bool) -> Callable[[], int]:
        """The launch of an executable graph of so many nodes; `holds_gil`: whoever calls it sees to the room."""
        if holds_gil or self._stream.external:
            launch = launcher(executable, self._target, holds_gil=holds_gil)
            context = self._stream.context
            return launch if context is NULL_CONTEXT else partial(launch_on_default, context, launch)
        self.used.add(self)
        self.left = min(self.left, self._share())
        holding, free = (launcher(executable, self._target, holds_gil=holds) for holds in (True, False))

        def launch_in_room() -> int:
            self.left -= nodes
            return holding() if self.left > 0 or self._begins_anew() else free()

        return launch_in_room

    @property
    def has_room(self) -> bool:
        """Whether the stream surely has room, so that who enqueues there need not wait."""
        return self.left > 0

    def _begins_anew(self) -> bool:
        """Whether there is room again: False, too, after a fault, which the launch will tell of."""
        if self.observed:
            return False
        with relaxed():  # or a capture of another thread would end by the look at an event
            if self._event is None:
                self._event = self._stream.device.event()
            elif driver.cuEventQuery.unchecked_holding_gil(self._event):
                return False
            if driver.cuEventRecord.unchecked_holding_gil(self._event, self._target):
                return False
        if self.left < -HALF:  # more than these were enqueued meanwhile, which are to be done first
            self.left = 0
            return False
        self.left = self._share()
        return True

    def _share(self) -> int:
        return HALF if len(self.used) <= STREAMS else max(HALF * STREAMS // len(self.used), 1)

    def close(self) -> None:
        """Give the event back."""
        self.used.discard(self)
        if self._event is not None:
            self._stream.device.recycle(self._event)
            self._event = None


def launch_on_default(context: AbstractContextManager[None], launch: Callable[[], int]) -> int:
    """Launch on a default stream, which is the executor's only in its device's context."""
    with context:
        return launch()
