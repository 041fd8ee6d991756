"""Streams, and the order between them: which stream a storage was last used on, and the event waits that follow.

Devices make streams, workers and direct calls enqueue on them. This module never allocates and never launches: it only
orders. On the host there is one stream, which is always done. Streams of other libraries are external.py's.
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
from dispatch.checks import shown
from dispatch.errors import BadRequest, Closed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    "members",
    "order",
    "relaxed",
]


class ExecutorLike(Protocol):
    """What this module knows of an executor (executor.py): the stream it enqueues on, and whether it has ended."""

    stream: Stream
    closed: bool


class Current(threading.local):
    """What the calling thread enqueues on: `executor`; its own stream on each device; its executors."""

    def __init__(self) -> None:
        self.executor: ExecutorLike | None = None
        self.own_streams: dict[Device, Stream] = {}
        self.per_thread: dict[Device, Stream] = {}  # handle 2 means this thread's own default stream
        self.executors: dict[Stream, ExecutorLike] = {}
        self.by_handle: dict[tuple[int, int], ExecutorLike] = {}  # on streams that last, by device and handle
        self.entered: list[ExecutorLike | None] = []


current = Current()


RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
DEFAULTS = (0, 1, 2)  # handles that are no objects: they mean a default stream of whatever context is current


class Order:
    """Counts what may change the order that a bound call relies on, so that it need not look at its tensors each time.

    `sync_epoch` moves on when a storage changes its owner, when a stream becomes known to others, and when an executor
    ends. A race between two threads that count is harmless: it still differs from the one remembered.
    """

    __slots__ = ("sync_epoch",)

    def __init__(self) -> None:
        self.sync_epoch = 0


order = Order()


@cache
def exchange_mode() -> Callable[[Any], int]:
    """The driver's function that exchanges the calling thread's capture mode; without a driver nobody captures."""
    try:
        exchange: Callable[[Any], int] = driver.cuThreadExchangeStreamCaptureMode.unchecked_holding_gil
    except LibraryNotFound:
        return _nothing_to_exchange
    return exchange


def _nothing_to_exchange(_mode: Any) -> int:
    return 0


class relaxed:  # used as a word: `with relaxed():`
    """Let this thread make calls that touch no stream under capture, whatever the mode of a capture forbids.

    The default mode (torch's) forbids all threads to wait, to look at events, to allocate and free memory and graphs:
    whoever does so ends the capture. Waiting for a whole context ends captures of every mode, here as well.
    """

    __slots__ = ("_mode",)

    def __enter__(self) -> None:
        self._mode = ctypes.byref(ctypes.c_int(RELAXED))  # one for each use: finalizers may come in between
        exchange_mode()(self._mode)

    def __exit__(self, *_: object) -> None:
        exchange_mode()(self._mode)


NULL_CONTEXT: AbstractContextManager[None] = nullcontext()


class StreamClass(type):
    """Has `Stream(x)` be the stream that `x` stands for, as a handle has one object; subclasses are like any class."""

    find: ClassVar[Callable[..., Stream]]  # set by stream_objects.py

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return StreamClass.find(*given, **named) if cls is Stream else super().__call__(*given, **named)


class Stream(metaclass=StreamClass):
    """One in-order queue of a device; `with stream:` makes it the current stream of the calling thread.

    `Device.stream()` makes one. `Stream(x)` is that of another library: of torch, CuPy, cuda.core or any object with
    `__cuda_stream__`; it is on the GPU that the object names, else on `device`'s, the current one by default.
    `Stream.from_handle` takes a bare handle. `x` is kept as long as memory that was used there; what else is alive when
    is said there.

    `external` says that somebody else knows the handle, though it be ours, and may be capturing it; only then is that
    asked before a replay. `with stream.context:` is for calls that take its handle: a default stream is this one only
    in its device's context.
    """

    __slots__ = ("__weakref__", "_owned", "c_handle", "closed", "context", "device", "external", "free_lists")

    device: Device
    c_handle: ctypes.c_void_p
    closed: bool
    external: bool
    context: AbstractContextManager[None]
    free_lists: dict[int, Any]  # of memory to be used here again, by size (block_cache.py)
    _owned: bool

    def __init__(self, stream: Any, device: Device | str | None = None) -> None:
        """As StreamClass has it."""

    @classmethod
    def from_handle(cls, device: Device, handle: int) -> Stream:
        """Use another library's `cudaStream_t` (`torch.cuda.current_stream().cuda_stream`); 0 is the legacy default.

        It must be alive now, inside `with` blocks of what comes back, and when a call that was prepared there runs.
        """
        given: Any = handle  # a user's may be anything
        if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < 1 << 64:
            raise BadRequest("handle", shown(given), "a cudaStream_t as an integer")
        return device.external(handle)

    @property
    def identity(self) -> int:
        """Which stream the handle means, where that may change (external.py)."""
        return 0

    @property
    def is_ours(self) -> bool:
        """Whether it is there as long as this object; a stream of another library is not."""
        return True

    @property
    def handle(self) -> int:
        """The `cudaStream_t` as an integer, to be given to other libraries."""
        self._become_external()
        return self.c_handle.value or 0

    def _become_external(self) -> None:
        if not self.external:
            self.external = True  # from now on somebody else may begin a capture on it
            order.sync_epoch += 1
            if self.free_lists:
                self.device.withdraw(self)

    def synchronize(self) -> None:
        """Wait until all that was enqueued here is done; raises what it ended in (DeviceFault for a fault)."""
        if self.device.is_host or self.closed:
            return
        if self.external and self.is_capturing():
            hint = "wait for a launch of the graph, once the capture has ended"
            raise BadRequest("stream", "a stream under capture", "one whose work is run", hint)
        with relaxed(), self.context:
            status = driver.cuStreamSynchronize.unchecked(self.c_handle)
        if status:
            self.device.fail(status, "cuStreamSynchronize")

    def done(self) -> bool:
        """Whether all that was enqueued here is done; raises what it ended in. What is captured is not run as yet."""
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
        """Let what is enqueued here from now on wait for all that is enqueued on `other` so far; the host does not.

        Where `other` is under capture, this stream goes into the same graph with it, until the capture ends.
        """
        if other is self or other.closed or self.device.is_host:
            return
        if other.external and other.is_capturing():
            self._become_external()
        self.wait_for_handle(other.c_handle)

    def wait_for_uses(self, other: Stream) -> None:
        """Let what is enqueued here from now on wait for all that this library has enqueued on `other`.

        A graph under capture cannot wait for what is outside of it: there it is the host that waits, now. Nor can
        others wait for what is only captured: BadRequest.
        """
        if other is self or other.closed or self.device.is_host:
            return
        mine = Stream.capture(self) if self.external else 0  # whoever enqueues here says that it is alive
        if mine:
            if other.capture() != mine:
                other.finish_uses()
                return
        elif other.external and other.capture():
            raise BadRequest(
                "stream", f"{self!r}, where nothing is captured", f"{other!r}, where an operand's use is under capture"
            )
        other.precede_handle(self.c_handle)

    def capture(self) -> int:
        """The number of the capture that this stream is in now; 0 where it is in none."""
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
        """Let what is enqueued here from now on wait for what an event was recorded behind."""
        with self.context:
            status = driver.cuStreamWaitEvent.unchecked(self.c_handle, event, 0)
        if status:
            self.device.fail(status, "cuStreamWaitEvent")

    def wait_for_handle(self, handle: ctypes.c_void_p) -> None:
        """`wait_for` a bare `cudaStream_t`, which is alive."""
        _order(self.device, before=handle, after=self.c_handle)

    def precede_handle(self, handle: ctypes.c_void_p) -> None:
        """Let the bare `cudaStream_t` wait for all that is enqueued here so far."""
        _order(self.device, before=self.c_handle, after=handle)

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured from this stream now."""
        if self.device.is_host:
            return False
        state = ctypes.c_int()
        with self.context:
            status = driver.cuStreamIsCapturing.unchecked_holding_gil(self.c_handle, ctypes.byref(state))
        if status == IMPLICIT:
            return True
        if status:
            self.device.fail(status, "cuStreamIsCapturing")
        return state.value != 0

    def finish_uses(self) -> None:
        """Wait until all that this library has enqueued here is done; raises what it ended in."""
        self.synchronize()

    def check(self) -> None:
        """Raise Closed where it was closed: its handle is gone."""
        if self.closed:
            raise Closed(f"{self!r} was closed; ask {self.device}.stream() for another")

    def close(self) -> None:
        """Wait for the stream and destroy it (another library's handle is only let go); a second call does nothing."""
        if self.closed or self.device.is_host:  # there is but one on the host
            return
        self.synchronize()
        self.closed = True
        if self.free_lists:
            self.device.withdraw(self)
        for executor in self.device.executors():
            if executor.stream is self:
                executor.close()  # what it remembers would be launched on a handle that is gone
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
        # No wait: the driver destroys a stream once its work is done. `closed` is set before the handle may go, for
        # memory that dies in the same garbage may have this stream for its owner, and must not touch it any more; but
        # not before the side stream is behind this one, for from then on another thread frees such memory there.
        is_made = getattr(self, "_owned", False)  # else Ctrl-C has come in between
        if is_made and not self.closed and self.c_handle.value and not sys.is_finalizing():
            self.device.retire(self)
            self.closed = True
            self.device.dispose(self.c_handle)
        if is_made and self.free_lists and not sys.is_finalizing():
            self.device.withdraw(self)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """No copy: two objects would destroy one stream."""
        raise TypeError(
            f"a {type(self).__name__} is of this process alone: neither it nor what is on it is copied or pickled. "
            "Take the numbers: x.numpy()"
        )

    def __repr__(self) -> str:
        return f"Stream({self.device}, {self.c_handle.value or 0:#x})"


class DeviceStream(Stream):
    """One that a device has made, or knows by its handle."""

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
    """One on which calls are prepared while the caller captures `stream`, for which it stands: memory is that one's."""

    __slots__ = ("stream",)

    def __init__(self, device: Device, handle: int, stream: Stream) -> None:
        super().__init__(device, handle, owned=False)
        self.stream = stream


NOT_READY = 600  # CUDA_ERROR_NOT_READY
IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: of the legacy stream, beside a capture that would wait for it


def _order(device: Device, *, before: ctypes.c_void_p, after: ctypes.c_void_p) -> None:
    """Record an event on one stream and let the other wait for it."""
    if (before.value or 0) in DEFAULTS or (after.value or 0) in DEFAULTS:
        with device.context:
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


def members(of: Iterable[Any]) -> list[Any]:
    """Those in a weak set, to which other threads may add meanwhile."""
    while True:
        try:
            return list(of)
        except RuntimeError:  # noqa: PERF203  # it changed size: the next look sees the one that came
            continue
