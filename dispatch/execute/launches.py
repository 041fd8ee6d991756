"""How an executor launches graphs on its stream: with or without the GIL, and in which context."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakSet

from cudabind import driver
from dispatch.device.disposal import members
from dispatch.device.stream import NULL_CONTEXT, relaxed
from dispatch.execute.cuda_graph import launcher

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from dispatch.device.stream import Stream

__all__ = ["KERNELS", "Launches"]

HALF = 128  # launches; with each one, memory may also be allocated and freed on the same stream
KERNELS = 8  # launches counted for one library call; a call with more may block in the driver
STREAMS = 16  # up to this number, each may use HALF; with more, several share one queue of the driver


class Launches:
    """The launches on one stream; they hold the GIL while the driver's queue certainly has room for them.

    Threads that release the GIL for each launch compete to get it back: 16 threads launched at 0.43 of the rate of one
    (H100). But a launch that blocks for room must not hold the GIL (cudabind.driver.BOUNDED). Launches block when about
    a thousand are outstanding on the streams that share one queue of the driver. `left` counts down from far fewer; at
    0 it starts again if the GPU has completed the work from before the last start. On another library's stream the
    number of outstanding launches is unknown, so launches there never hold the GIL. No launch holds it while a profiler
    is active, because the driver may wait for a Python callback of the profiler's own thread.
    """

    __slots__ = ("__weakref__", "_event", "_stream", "left", "stream_handle")

    used: ClassVar[WeakSet[Launches]] = WeakSet()  # the objects that have graphs to launch
    observed: ClassVar[bool] = False  # whether a profiler is active: no launch on any stream holds the GIL

    def __init__(self, stream: Stream, handle: ctypes.c_void_p) -> None:
        self._stream, self.stream_handle = stream, handle
        self._event: ctypes.c_void_p | None = None  # recorded when `left` last started
        self.left = 0 if self.observed else HALF

    @classmethod
    def observe(cls, observed: bool) -> None:
        """Set whether a profiler is active: then no launch holds the GIL."""
        cls.observed = observed
        if observed:
            for each in members(cls.used):
                each.left = 0

    def of(self, executable: ctypes.c_void_p, nodes: int, *, holds_gil: bool) -> Callable[[], int]:
        """A function that launches an executable graph with this number of nodes.

        With `holds_gil` it always holds the GIL, and the caller must make sure that there is room.
        """
        if holds_gil or self._stream.external:
            launch = launcher(executable, self.stream_handle, holds_gil=holds_gil)
            context = self._stream.context
            return launch if context is NULL_CONTEXT else partial(launch_on_default, context, launch)
        self.used.add(self)
        self.left = min(self.left, self._share())
        holding, free = (launcher(executable, self.stream_handle, holds_gil=holds) for holds in (True, False))

        def launch_in_room() -> int:
            self.left -= nodes
            return holding() if self.left > 0 or self._begins_anew() else free()

        return launch_in_room

    @property
    def has_room(self) -> bool:
        """Whether the stream certainly has room, so that enqueueing there does not block."""
        return self.left > 0

    def _begins_anew(self) -> bool:
        """Start counting again if there is room, and return whether there is; False after a fault, too."""
        if self.observed:
            return False
        with relaxed():  # else querying an event would end another thread's capture
            if self._event is None:
                self._event = self._stream.device.event()
            elif driver.cuEventQuery.unchecked_holding_gil(self._event):
                return False
            if driver.cuEventRecord.unchecked_holding_gil(self._event, self.stream_handle):
                return False
        if self.left < -HALF:  # too many were enqueued meanwhile: wait until they are done
            self.left = 0
            return False
        self.left = self._share()
        return True

    def _share(self) -> int:
        return HALF if len(self.used) <= STREAMS else max(HALF * STREAMS // len(self.used), 1)

    def close(self) -> None:
        """Return the event to its pool."""
        self.used.discard(self)
        if self._event is not None:
            self._stream.device.recycle(self._event)
            self._event = None


def launch_on_default(context: AbstractContextManager[None], launch: Callable[[], int]) -> int:
    """Launch on a default stream, whose handle refers to the executor's stream only in its device's context."""
    with context:
        return launch()
