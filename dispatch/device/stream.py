"""Streams and the order between them, by events.

Devices make streams; workers and direct calls enqueue on them. This module neither allocates nor launches, it only
orders work. The host has one stream, which is always done. Streams of other libraries are in external.py.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from cudabind import driver
from cudabind.errors import LibraryNotFound
from dispatch.checks import check_type
from dispatch.device.disposal import dispose
from dispatch.device.gpus import DEFAULTS, check_handle
from dispatch.errors import BadRequest, Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from dispatch.device.device import Device

__all__ = [
    "Current",
    "DeviceStream",
    "ExecutorLike",
    "Order",
    "QuietStream",
    "Stream",
    "StreamClass",
    "current",
    "exchange_mode",
    "order",
    "relaxed",
]


class ExecutorLike(Protocol):
    """The part of an executor (executor.py) that this module uses: its stream, and whether it is closed."""

    stream: Stream
    closed: bool


class Current(threading.local):
    """The state of the calling thread: its current executor, its own stream on each device, all its executors."""

    def __init__(self) -> None:
        self.executor: ExecutorLike | None = None
        self.own_streams: dict[Device, Stream] = {}
        self.per_thread: dict[Device, Stream] = {}  # for handle 2, the default stream of this thread
        self.executors: dict[Stream, ExecutorLike] = {}
        self.by_handle: dict[tuple[int, int], ExecutorLike] = {}  # on lasting streams, by device and handle
        self.entered: list[ExecutorLike | None] = []


current = Current()
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Order:
    """A counter of events that change stream order; while it is constant, a bound call need not check its tensors.

    `sync_epoch` grows when a storage changes its owner, a stream becomes known to other libraries, or an executor is
    closed. If two threads count at once, one increment may be lost: the value still differs from any stored value.
    """

    __slots__ = ("sync_epoch",)

    def __init__(self) -> None:
        self.sync_epoch = 0


order = Order()


@cache
def exchange_mode() -> Callable[[Any], int]:
    """The driver's function that exchanges the calling thread's capture mode; without a driver, a no-op."""
    try:
        exchange: Callable[[Any], int] = driver.cuThreadExchangeStreamCaptureMode.unchecked_holding_gil
    except LibraryNotFound:
        return _nothing_to_exchange
    return exchange


def _nothing_to_exchange(_mode: Any) -> int:
    return 0


class relaxed:  # lower case, because it is used as `with relaxed():`
    """Set this thread's capture mode to RELAXED, so that calls which touch no stream under capture do not end it.

    In the default mode (torch's), any thread that waits, queries an event, or allocates or frees memory or graphs ends
    the capture. Waiting for a whole context ends captures in every mode, in this one, too.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.byref(ctypes.c_int(RELAXED))  # one for each block: a finalizer may nest another
        exchange_mode()(self._mode)

    def __exit__(self, *_: object) -> None:
        exchange_mode()(self._mode)


NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


class StreamClass(type):
    """Makes `Stream(x)` return the only object for x's handle; subclasses are constructed as usual."""

    find: ClassVar[Callable[..., Stream]]  # set by stream_objects.py

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return StreamClass.find(*given, **named) if cls is Stream else super().__call__(*given, **named)


class Stream(metaclass=StreamClass):
    """One in-order queue of a device; `with stream:` makes it the current stream of the calling thread.

    `Device.stream()` makes one. `Stream(x)` wraps a stream of torch, CuPy, cuda.core or any object with
    `__cuda_stream__`; its GPU is the one that the object reports, else `device`, by default the current one.
    `Stream.from_handle` takes a bare handle. The object `x` lives as long as memory that was used there; see
    `from_handle` for when a bare handle must be alive.

    `external` means that another library knows the handle, even of a stream of this library, and may be capturing it;
    only then the driver is queried for a capture. Enter `stream.context` around calls that take the handle: the handle
    of a default stream refers to this stream only in its device's context.
    """

    __slots__ = ("__weakref__", "_owned", "c_handle", "closed", "context", "device", "external", "free_lists")

    device: Device
    c_handle: ctypes.c_void_p
    closed: bool
    external: bool
    context: AbstractContextManager[None]
    free_lists: dict[int, Any]  # of memory to reuse on this stream, by size (block_cache.py)
    _owned: bool

    def __init__(self, stream: Any, device: Device | str | None = None) -> None:
        """For type checkers; see StreamClass."""

    @classmethod
    def from_handle(cls, device: Device, handle: int) -> Stream:
        """Use another library's `cudaStream_t` (`torch.cuda.current_stream().cuda_stream`); 0 is the legacy default.

        It must be alive now, inside `with` blocks of the result, and when a call that was prepared on it runs.
        """
        from dispatch.device.device import Device  # which imports this module

        check_type("device", device, Device)
        return device.external(check_handle("handle", handle))

    @property
    def identity(self) -> int:
        """A number that distinguishes successive streams with the same handle (external.py); 0 for our own streams."""
        return 0

    @property
    def is_ours(self) -> bool:
        """Whether the stream lives as long as this object; a stream of another library may not."""
        return True

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer, for other libraries; reading it marks the stream as `external`."""
        self.check()
        self._become_external()
        return self.c_handle.value or 0

    def _become_external(self) -> None:
        if not self.external:
            self.external = True  # from now on another library may begin a capture on it
            order.sync_epoch += 1
            if self.free_lists:
                self.device.withdraw(self)

    def synchronize(self) -> None:
        """Wait until all work enqueued here is done; raises the error that it ended in (DeviceFault for a fault)."""
        if self.device.is_host or self.closed:
            return
        if self.external and self.is_capturing():
            hint = "after the capture has ended, wait for a launch of the graph"
            raise BadRequest("stream", "a stream under capture", "one that is not under capture", hint)
        with relaxed(), self.context:
            status = driver.cuStreamSynchronize.unchecked(self.c_handle)
        if status:
            self.device.fail(status, "cuStreamSynchronize")

    def done(self) -> bool:
        """Whether all work enqueued here is done, False under capture; raises the error that it ended in."""
        if self.device.is_host or self.closed:
            return True
        if self.external and self.is_capturing():
            return False
        with relaxed(), self.context:
            status = driver.cuStreamQuery.unchecked(self.c_handle)
        if status and status != NOT_READY:
            self.device.fail(status, "cuStreamQuery")
        return bool(status == 0)

    def wait_for(self, other: Stream) -> None:
        """Make work enqueued here from now on wait for all that is enqueued on `other` so far; the host does not wait.

        If `other` is under capture, this stream joins the same capture until that ends. Raises Closed if this stream is
        closed.
        """
        check_type("other", other, Stream)
        self.check()
        if other is self or other.closed or self.device.is_host:
            return
        if other.external and other.is_capturing():
            self._become_external()
        self.wait_for_handle(other.c_handle)

    def wait_for_uses(self, other: Stream) -> None:
        """Make work enqueued here from now on wait for all that this library has enqueued on `other`.

        A graph under capture cannot wait for work outside of it, so the host waits now in that case. Work outside of a
        graph cannot wait for work that is only captured: BadRequest.
        """
        if other is self or other.closed or self.device.is_host:
            return
        own_capture = Stream.capture(self) if self.external else 0  # the caller enqueues here, so the handle is alive
        if own_capture:
            if other.capture() != own_capture:
                other.finish_uses()
                return
        elif other.external and other.capture():
            raise BadRequest(
                "stream",
                f"{self!r}, which is not under capture",
                f"{other!r}, whose capture contains a use of an operand",
            )
        other.precede_handle(self.c_handle)

    def capture(self) -> int:
        """The driver's id of the capture that this stream is in now; 0 for none."""
        if self.device.is_host or self.closed or not (self.external and self.is_capturing()):
            return 0
        number = ctypes.c_uint64()
        with self.context:
            status = driver.cuStreamGetCaptureInfo.unchecked(
                self.c_handle, ctypes.byref(ctypes.c_int()), ctypes.byref(number), None, None, None, None
            )
        if status:
            self.device.fail(status, "cuStreamGetCaptureInfo")
        return number.value

    def wait_for_event(self, event: ctypes.c_void_p) -> None:
        """Make work enqueued here from now on wait for an event."""
        with self.context:
            status = driver.cuStreamWaitEvent.unchecked(self.c_handle, event, 0)
        if status:
            self.device.fail(status, "cuStreamWaitEvent")

    def wait_for_handle(self, handle: ctypes.c_void_p) -> None:
        """As `wait_for`, for a bare `cudaStream_t`, which must be alive."""
        _order(self.device, before=handle, after=self.c_handle)

    def precede_handle(self, handle: ctypes.c_void_p) -> None:
        """Make a bare `cudaStream_t`, which must be alive, wait for all that is enqueued here so far."""
        _order(self.device, before=self.c_handle, after=handle)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured from this stream now."""
        if self.device.is_host:
            return False
        state, query = ctypes.c_int(), driver.cuStreamIsCapturing.unchecked_holding_gil
        if self.context is NULL_CONTEXT:  # a `with` block of it takes 0.2 us
            status = query(self.c_handle, ctypes.byref(state))
        else:
            with self.context:
                status = query(self.c_handle, ctypes.byref(state))
        if status == IMPLICIT:
            return True
        if status:
            self.device.fail(status, "cuStreamIsCapturing")
        return state.value != 0

    def finish_uses(self) -> None:
        """Wait until all that this library has enqueued here is done; raises the error that it ended in."""
        self.synchronize()

    def check(self) -> None:
        """Raise Closed if the stream was closed."""
        if self.closed:
            raise Closed(f"{self!r} was closed; {self.device}.stream() creates another")

    def close(self) -> None:
        """Wait for the stream and destroy it (not if it is another library's, or the only one of the host)."""
        if self.closed or self.device.is_host:
            return
        self.synchronize()
        self.closed = True
        if self.free_lists:
            self.device.withdraw(self)
        for executor in self.device.executors():
            if executor.stream is self:
                executor.close()  # else its cached calls would be launched on a dead handle
        current.executors.pop(self, None)
        if self._owned:
            self.device.dispose(self.c_handle)

    def __enter__(self) -> Self:
        self.device.check()
        self.check()
        current.entered.append(current.executor)
        try:
            current.executor = self.device.executor(self)
        except BaseException:
            current.entered.pop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        current.executor = current.entered.pop()

    def __del__(self) -> None:
        # No wait: the driver destroys a stream once its work is done. `closed` is set before the handle may be dead:
        # storages collected in the same pass may have this stream as owner and must not use it any more. It is set only
        # after the side stream waits for this one: from then on other threads free such memory on the side stream.
        is_made = getattr(self, "_owned", False)  # False if Ctrl-C interrupted __init__
        if is_made and not sys.is_finalizing():
            dispose(Stream._end, self)

    def _end(self) -> None:
        if not self.closed and self.c_handle.value:
            self.device.retire(self)
            self.closed = True
            self.device.dispose(self.c_handle)
        if self.free_lists:
            self.device.withdraw(self)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse copies: two objects would destroy one stream."""
        raise TypeError(
            f"a {type(self).__name__} belongs to this process: neither it nor objects on it can be copied or pickled. "
            "Pass the elements instead: x.numpy()"
        )

    def __repr__(self) -> str:
        return f"Stream({self.device}, {self.c_handle.value or 0:#x})"


class DeviceStream(Stream):
    """A stream that a device has created, or wraps by its handle."""

    __slots__ = ()

    def __init__(self, device: Device, handle: int, *, owned: bool) -> None:
        self.device = device
        self.c_handle = ctypes.c_void_p(handle)
        self.closed = False
        self.external = not owned
        self.free_lists = {}
        self.context = NULL_CONTEXT if owned or handle not in DEFAULTS or device.is_alone else device.context
        self._owned = owned


class QuietStream(DeviceStream):
    """A stream on which calls are prepared while the caller captures `stream`; memory is allocated for `stream`."""

    __slots__ = ("stream",)

    def __init__(self, device: Device, handle: int, stream: Stream) -> None:
        super().__init__(device, handle, owned=False)
        self.stream = stream


NOT_READY = 600  # CUDA_ERROR_NOT_READY
IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: for a query of the legacy stream during a capture


def _order(device: Device, *, before: ctypes.c_void_p, after: ctypes.c_void_p) -> None:
    """Record an event on one stream and make the other wait for it."""
    needs_context = (before.value or 0) in DEFAULTS or (after.value or 0) in DEFAULTS
    with device.context if needs_context else nullcontext():
        _wait(device, before, after)


def _wait(device: Device, before: ctypes.c_void_p, after: ctypes.c_void_p) -> None:
    event = device.event()
    for name, status in (
        ("cuEventRecord", driver.cuEventRecord.unchecked(event, before)),
        ("cuStreamWaitEvent", driver.cuStreamWaitEvent.unchecked(after, event, 0)),
    ):
        if status:
            device.fail(status, name)
    device.recycle(event)  # the wait refers to this recording: the event may be recorded again at once
