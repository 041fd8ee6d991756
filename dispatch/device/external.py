"""Streams of other libraries: one object for each handle; a handle that may be dead is never used.

`Stream.from_handle` returns them. A caller guarantees that the handle is alive only while it uses the stream: inside a
`with` block, while a prepared call runs, during an exchange of tensors. At the end of the last such use an event is
recorded; from then on memory and other streams wait for the event, not for the handle. This module neither allocates
nor launches.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from cudabind import driver
from cudabind._fork import anew
from cudabind.errors import SymbolNotFound
from dispatch.device.gpus import DEFAULTS
from dispatch.device.stream import NULL_CONTEXT, DeviceStream, current, relaxed
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self

    from dispatch.device.device import Device

__all__ = ["ExternalStream", "ExternalStreams"]

LEGACY = (0, 1)  # both mean the legacy default stream, which is never destroyed
PER_THREAD = 2  # the default stream of the thread that passes it


class ReleasesLike(Protocol):
    """The part of the device's Releases (releases.py) that this module uses; a protocol, to avoid a circular import."""

    def release_waiting(self, stream: ExternalStream) -> None: ...
    def put_back(self, waiting: Iterable[Any]) -> None: ...


class ExternalStream(DeviceStream):
    """Another library's stream.

    Guarantees: the handle is passed to the driver only between `claim` and `unclaim`, and in calls that the user makes
    on this object. When the last claim ends, `event` is recorded after all that this library has enqueued. If the
    handle later refers to another stream (`identity` differs), that stream waits for the event, so that both form
    one ordered stream. `unmarked` is non-zero if the event could not be recorded because a capture had begun. It is
    recorded later on that same stream; once the handle refers to another one, only a wait for the device helps. A
    `lasting` stream is never destroyed and needs none of this.
    """

    __slots__ = (
        "_claims",
        "_free_as",
        "_releases",
        "_unmarked_as",
        "event",
        "identity",
        "lasting",
        "lock",
        "source",
        "unmarked",
        "waiting",
    )

    identity: int

    def __init__(self, device: Device, handle: int, releases: ReleasesLike) -> None:
        super().__init__(device, handle, owned=False)
        self.lock = threading.RLock()  # a finalizer may run inside it
        anew(self, "lock", threading.RLock)
        self.identity = 0
        self.lasting = False  # whether its library never destroys it
        self.source: Any = None  # the other library's stream object, if one was passed: kept alive
        self._releases = releases
        self.unmarked = 0
        self._claims: dict[object, None] = {}  # the keys passed to `claim`, in order
        self.event: ctypes.c_void_p | None = None
        self._free_as: int | None = None  # its identity when it was claimed; None under a capture
        self._unmarked_as: int | None = None  # `_free_as` when the event could not be recorded
        # Memory (PendingRelease) that was lent to this stream, until it is used again.
        self.waiting: deque[Any] = deque()
        self.recognize()

    @property
    def is_ours(self) -> bool:
        return False

    @property
    def is_alive(self) -> bool:
        """Whether this thread may pass its handle to the driver; hold `lock` as long as you rely on the answer."""
        handle = self.c_handle.value or 0
        if handle == PER_THREAD:
            return bool(self._claims) and current.per_thread.get(self.device) is self
        return bool(self._claims) or handle in LEGACY or self.lasting

    @property
    def is_current(self) -> bool:
        """Whether this thread is in a `with` block of it."""
        return bool(current.entered) and current.executor is not None and current.executor.stream is self

    @property
    def is_lasting(self) -> bool:
        """Whether its handle always refers to this stream."""
        return self.lasting or (self.c_handle.value or 0) in LEGACY

    def last(self) -> None:
        """Declare that its library never destroys it: the handle is always valid, and no event is needed."""
        with self.lock:
            self.lasting, self.unmarked = True, 0

    def claim(self, block: object) -> None:
        """Declare that the stream is alive until `unclaim` is called with the same `block`."""
        with self.lock:
            self.recognize()
            if not self._claims:
                self._free_as = None if self.is_capturing() else self.identity
                if self.unmarked and self._free_as is not None:
                    self._mark()
            self._claims[block] = None
        if self.waiting and self.identity >= 0:
            self._releases.release_waiting(self)

    def unclaim(self, block: object) -> None:
        """End a claim: the stream may be destroyed from now on. If Ctrl-C interrupts this, call it again."""
        with self.lock:
            try:
                if [*self._claims] == [block]:
                    self._mark()
            except Exception:
                self._claims.pop(block, None)
                raise
            self._claims.pop(block, None)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """A block that claims the stream."""
        block = object()
        try:
            self.claim(block)
            yield
        finally:
            try:
                self.unclaim(block)
            except BaseException:  # Ctrl-C, even before the first line of `unclaim`
                self.unclaim(block)
                raise

    def recognize(self) -> None:
        """Query which stream the live handle refers to now; if it is a new one, make it wait for the last `event`.

        The query would end a capture, so a stream under capture counts as a new one until the capture has ended.
        """
        if self.lasting or (self.c_handle.value or 0) in (*LEGACY, PER_THREAD):
            return
        with self.lock:
            is_captured = self.is_capturing()
            if is_captured and self.identity < 0 and self._claims:
                return
            identity = -next(_numbers) if is_captured else _identity(self.c_handle)
            if identity == self.identity != 0:
                return
            self.identity = identity
            if self.event is None:
                return
            if is_captured:  # a graph cannot wait for work outside of it
                with relaxed():
                    driver.cuEventSynchronize.unchecked(self.event)
            else:
                driver.cuStreamWaitEvent.unchecked(self.c_handle, self.event, 0)

    def capture(self) -> int:
        with self.lock:
            return super().capture() if self.is_alive else 0

    def _mark(self) -> None:
        """Record the event after all work that is enqueued here."""
        if self.lasting or (self.c_handle.value or 0) in LEGACY:
            return
        if self.is_capturing():
            if self._free_as is not None:
                self._miss()
            return
        if self.unmarked:
            self.recognize()
        if self.event is None:
            self.event = self.device.event()
        with self.context:
            status = driver.cuEventRecord.unchecked(self.event, self.c_handle)
        if status:
            self._miss()
        elif self.identity == self._unmarked_as:
            self.unmarked = 0

    def _miss(self) -> None:
        if not self.unmarked:
            self._unmarked_as = self._free_as
        self.unmarked = next(_numbers)

    def precede_handle(self, handle: ctypes.c_void_p) -> None:
        with self.lock:
            if self.is_alive:
                super().precede_handle(handle)
                if self.unmarked and not self.is_capturing():
                    self.refuse_unmarked()
                return
            if self.event is not None:
                with self.device.context if (handle.value or 0) in DEFAULTS else NULL_CONTEXT:
                    status = driver.cuStreamWaitEvent.unchecked(handle, self.event, 0)
                if status:
                    self.device.fail(status, "cuStreamWaitEvent")
            self.refuse_unmarked()

    def finish_uses(self) -> None:
        with self.lock:
            if not self.is_alive:
                with relaxed():
                    status = 0 if self.event is None else driver.cuEventSynchronize.unchecked(self.event)
                if status:
                    self.device.fail(status, "cuEventSynchronize")
                self.refuse_unmarked()
                return
        self.synchronize()
        self.refuse_unmarked()

    def refuse_unmarked(self) -> None:
        """Raise BadRequest if no work can be ordered after the work that was enqueued here."""
        if self.unmarked:
            raise BadRequest(
                "stream",
                f"{self!r}, on which a capture began inside of its `with` block and had not ended when the block did",
                "a block that ends before the capture begins, or after it has ended",
                "wait for the device once the capture has ended",
            )

    def close(self) -> None:
        """Wait for the stream, but do not destroy it: its library may go on using it."""
        self.synchronize()

    def __enter__(self) -> Self:
        block = threading.get_ident(), object()
        try:
            self.claim(block)
            return super().__enter__()
        except BaseException:
            self.unclaim(block)
            raise

    def __exit__(self, *given: object) -> None:
        try:
            super().__exit__(*given)
        finally:
            block: object = None
            try:
                block = self._latest_block()
                self.unclaim(block)
            except BaseException:
                self.unclaim(block or self._latest_block())
                raise

    def _latest_block(self) -> object:
        """The claim of this thread's innermost open `with` block of the stream."""
        me = threading.get_ident()
        return next((block for block in reversed([*self._claims]) if type(block) is tuple and block[0] == me), None)

    def __del__(self) -> None:
        event, waiting = getattr(self, "event", None), getattr(self, "waiting", None)
        if event is not None and not sys.is_finalizing():
            self.device.recycle(event)
        if waiting and not sys.is_finalizing():
            self._releases.put_back(waiting)


class ExternalStreams:
    """The external streams of one device by handle, as weak references."""

    def __init__(self, device: Device, releases: ReleasesLike) -> None:
        self._device, self._releases = device, releases
        self._known: WeakValueDictionary[int, ExternalStream] = WeakValueDictionary()
        self._lock = threading.RLock()
        anew(self, "_lock", threading.RLock)

    def named(self, handle: int) -> ExternalStream:
        """The stream of a live handle."""
        if handle == PER_THREAD:
            per_thread = current.per_thread.get(self._device)
            if not isinstance(per_thread, ExternalStream):
                per_thread = current.per_thread[self._device] = ExternalStream(self._device, handle, self._releases)
            return per_thread
        key = 0 if handle in LEGACY else handle
        with self._lock:
            stream = self._known.get(key)
            if stream is None:
                stream = self._known[key] = ExternalStream(self._device, handle, self._releases)
                return stream
        stream.recognize()
        return stream

    def unmarked(self) -> list[tuple[ExternalStream, int]]:
        """The streams that are unmarked, each with its value of `unmarked`, which counts up."""
        return [(stream, stream.unmarked) for stream in list(self._known.values()) if stream.unmarked]


_numbers = itertools.count(1)


def _identity(handle: ctypes.c_void_p) -> int:
    """The driver's unique id of a stream; 0 with drivers before CUDA 12, which have no such ids."""
    number = ctypes.c_uint64()
    try:
        driver.cuStreamGetId.unchecked(handle, ctypes.byref(number))
    except SymbolNotFound:
        return 0
    return number.value
