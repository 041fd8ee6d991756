"""Streams, and the order between them: which stream a storage was last used on, and the event waits that follow.

Devices make streams, workers and direct calls enqueue on them. This room never allocates and never launches: it only
orders. On the host there is one stream, which is always done.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

from cudabind import driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

    from dispatch.device import Device

__all__ = ["Current", "LaneLike", "Order", "Stream", "current", "order", "relaxed"]


class LaneLike(Protocol):
    """What this room knows of a lane (lane.py): the stream it enqueues on, and whether it has ended."""

    stream: Stream
    closed: bool


class Current(threading.local):
    """What the calling thread enqueues on: `lane`; its own stream on each device; its lanes, by stream."""

    def __init__(self) -> None:
        self.lane: LaneLike | None = None
        self.homes: dict[Device, Stream] = {}
        self.lanes: dict[Stream, LaneLike] = {}
        self.entered: list[LaneLike | None] = []


current = Current()


RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
DEFAULTS = (0, 1, 2)  # handles that are no objects: they mean a default stream of whatever context is current


class Order:
    """Counts what may change the order that a bound call relies on, so that it need not look at its tensors each time.

    `epoch` moves on when a storage changes its owner, when a stream becomes known to others, and when a lane ends. A
    race between two threads that count is harmless: the epoch still differs from the one remembered.
    """

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0


order = Order()


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread make calls that touch no stream under capture, whatever the mode of that capture forbids."""
    mode = ctypes.c_int(RELAXED)
    driver.cuThreadExchangeStreamCaptureMode.unchecked(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode.unchecked(ctypes.byref(mode))


NOWHERE: AbstractContextManager[None] = nullcontext()


class Stream:
    """One in-order queue of a device; `with stream:` makes it the current stream of the calling thread.

    Made by `Device.stream()`, or by `Stream.from_handle` over another library's stream, which then must outlive it.
    `foreign` says that somebody else knows the handle and may be capturing it; only then is that asked before a replay.
    `with stream.here:` is for calls that take its handle: a default stream is this one only in its device's context.
    """

    __slots__ = ("__weakref__", "_owned", "c_handle", "closed", "device", "foreign", "here")

    def __init__(self, device: Device, handle: int, *, owned: bool) -> None:
        self.device = device
        self.c_handle = ctypes.c_void_p(handle)
        self.closed = False
        self.foreign = not owned
        self.here = NOWHERE if owned or handle not in DEFAULTS or device.is_alone else device.here
        self._owned = owned

    @classmethod
    def from_handle(cls, device: Device, handle: int) -> Stream:
        """Use another library's `cudaStream_t` (`torch.cuda.current_stream().cuda_stream`); 0 is the legacy default."""
        return cls(device, handle, owned=False)

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer, to be given to other libraries."""
        if not self.foreign:
            self.foreign = True  # from now on somebody else may begin a capture on it
            order.epoch += 1
        return self.c_handle.value or 0

    def synchronize(self) -> None:
        """Wait until all that was enqueued here is done; raises what it ended in (DeviceFault for a fault)."""
        if self.device.is_host or self.closed:
            return
        with self.here:
            status = driver.cuStreamSynchronize.unchecked(self.c_handle)
        if status:
            self.device.fail(status, "cuStreamSynchronize")

    def done(self) -> bool:
        """Whether all that was enqueued here is done; raises what it ended in."""
        if self.device.is_host or self.closed:
            return True
        with self.here:
            status = driver.cuStreamQuery.unchecked(self.c_handle)
        if status and status != NOT_READY:
            self.device.fail(status, "cuStreamQuery")
        return bool(status == 0)

    def wait_for(self, other: Stream) -> None:
        """Let what is enqueued here from now on wait for all that is enqueued on `other` so far; the host does not."""
        if other is self or other.closed or self.device.is_host:
            return
        self.wait_for_handle(other.c_handle)

    def wait_for_handle(self, handle: ctypes.c_void_p) -> None:
        """`wait_for` a bare `cudaStream_t`."""
        _order(self.device, before=handle, after=self.c_handle)

    def precede_handle(self, handle: ctypes.c_void_p) -> None:
        """Let the bare `cudaStream_t` wait for all that is enqueued here so far."""
        _order(self.device, before=self.c_handle, after=handle)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured from this stream now."""
        if self.device.is_host:
            return False
        state = ctypes.c_int()
        with self.here:
            status = driver.cuStreamIsCapturing.unchecked_holding_gil(self.c_handle, ctypes.byref(state))
        if status:
            self.device.fail(status, "cuStreamIsCapturing")
        return state.value != 0

    def close(self) -> None:
        """Wait for the stream and destroy it (a foreign handle is only let go); a second call does nothing."""
        if self.closed:
            return
        self.synchronize()
        self.closed = True
        if self._owned and not self.device.is_host:
            driver.cuStreamDestroy.unchecked(self.c_handle)

    def __enter__(self) -> Self:
        self.device.check()
        current.entered.append(current.lane)
        current.lane = self.device.lane(self)
        return self

    def __exit__(self, *_: object) -> None:
        current.lane = current.entered.pop()

    def __del__(self) -> None:
        # No wait: the driver destroys a stream once its work is done. `closed` is set first, for memory that dies in
        # the same garbage may have this stream for its owner, and must not touch the handle any more.
        if self._owned and not self.closed and self.c_handle.value and not sys.is_finalizing():
            self.closed = True
            self.device.retire(self)
            driver.cuStreamDestroy.unchecked(self.c_handle)

    def __repr__(self) -> str:
        return f"Stream({self.device}, {self.c_handle.value or 0:#x})"


NOT_READY = 600  # CUDA_ERROR_NOT_READY


def _order(device: Device, *, before: ctypes.c_void_p, after: ctypes.c_void_p) -> None:
    """Record an event on one stream and let the other wait for it."""
    if (before.value or 0) in DEFAULTS or (after.value or 0) in DEFAULTS:
        with device.here:
            _wait(device, before, after)
    else:
        _wait(device, before, after)


def _wait(device: Device, before: ctypes.c_void_p, after: ctypes.c_void_p) -> None:
    event = device.event()
    for name, status in (
        ("cuEventRecord", driver.cuEventRecord.unchecked(event, before)),
        ("cuStreamWaitEvent", driver.cuStreamWaitEvent.unchecked(after, event, 0)),
    ):
        if status:
            device.fail(status, name)
    device.recycle(event)  # a wait holds the state of its record: the event may be recorded again at once
