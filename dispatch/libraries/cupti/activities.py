"""The activities of a GPU during a recording: kernels, copies and fills with their times, read from CUPTI's buffers.

`dispatch.trace.profile` starts and stops the recording, and waits for the GPU before. CUPTI has one user per process;
it requests buffers and returns them full, by two callbacks on threads of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudabind.errors import CudaError
from cudabind.sys import cupti
from dispatch.errors import DeviceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Activity", "Recording"]

# Enough for 40,000 kernels. Its pages are used as it is filled; CUPTI returns it when it is full, or at a flush.
BUFFER_BYTES = 1 << 23
KINDS = cupti.CUpti_ActivityKind
RECORDED = (
    KINDS.CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,  # which lets kernels run at the same time, other than KIND_KERNEL
    KINDS.CUPTI_ACTIVITY_KIND_MEMCPY,
    KINDS.CUPTI_ACTIVITY_KIND_MEMCPY2,  # between GPUs
    KINDS.CUPTI_ACTIVITY_KIND_MEMSET,
)
# The records that CUPTI writes, by its version, from cupti_activity.h: each struct extends the one of older versions.
RECORDS = (
    # version, of a kernel, a copy, a copy between GPUs, a fill
    ((13, 5), ("Kernel13", "Memcpy7", "MemcpyPtoP4", "Memset5")),
    ((13, 1), ("Kernel11", "Memcpy6", "MemcpyPtoP4", "Memset4")),
    ((13, 0), ("Kernel10", "Memcpy6", "MemcpyPtoP4", "Memset4")),
    ((0, 0), ("Kernel9", "Memcpy6", "MemcpyPtoP4", "Memset4")),
)


@dataclass(frozen=True)
class Activity:
    """One kernel, copy or fill: what it was, where it ran, and when, in nanoseconds of CUPTI's clock."""

    kind: str  # "kernel", "memcpy" or "memset"
    name: str
    start: int
    end: int
    device: int
    context: int
    stream: int  # CUPTI's number of the stream, which is no address
    correlation: int  # the same for all activities of one driver call
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_bytes: int = 0
    registers: int = 0
    bytes: int = 0  # copied or filled
    graph_node: int = 0  # 0 if it was not launched by a graph

    @property
    def microseconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1000


class _Buffers:
    """The buffers that CUPTI holds or has filled; its callbacks are registered once, and must stay alive."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lent: dict[int, Any] = {}
        self.filled: list[tuple[int, Any, int]] = []  # the address, the memory, and how much of it is valid

    def buffer_requested(self, buffer: int, size: int, most: int) -> None:
        """CUPTI requests a buffer: store its address, its size and its maximum number of records (0: any)."""
        made = (ctypes.c_uint8 * BUFFER_BYTES).from_buffer(mmap.mmap(-1, BUFFER_BYTES))
        address = ctypes.addressof(made)
        with self.lock:
            self.lent[address] = made
        ctypes.c_void_p.from_address(buffer).value = address
        ctypes.c_size_t.from_address(size).value = BUFFER_BYTES
        ctypes.c_size_t.from_address(most).value = 0

    def buffer_completed(self, _context: int | None, _stream: int, buffer: int, _size: int, valid: int) -> None:
        """CUPTI returns a buffer, with `valid` bytes of records."""
        with self.lock:
            memory = self.lent.pop(buffer, None)  # None: a buffer of another profiler that ran before
            if memory is not None and valid:
                self.filled.append((buffer, memory, valid))

    def collect(self) -> list[tuple[int, Any, int]]:
        """Take the filled buffers."""
        with self.lock:
            filled, self.filled = self.filled, []
            return filled


_buffers = _Buffers()
_buffer_requested = cupti.CUpti_BuffersCallbackRequestFunc(_buffers.buffer_requested)
_buffer_completed = cupti.CUpti_BuffersCallbackCompleteFunc(_buffers.buffer_completed)
_ignore_callback = cupti.CUpti_CallbackFunc(lambda *_: None)  # a subscriber must have a callback; no domain is enabled
_recording_lock = threading.Lock()


class Recording:
    """From its creation until `stop`, CUPTI records the activities of this process on its GPUs.

    Raises:
        DeviceUnavailable: another recording runs, or another profiler has CUPTI in this process.
        LibraryNotFound: CUPTI is not installed.
        CuptiError: CUPTI fails for another reason.
    """

    def __init__(self) -> None:
        if not _recording_lock.acquire(blocking=False):
            raise DeviceUnavailable("another profile() is running in this process: CUPTI supports one user at a time")
        self.dropped = 0  # records that did not fit into CUPTI's buffers
        self._subscriber = cupti.CUpti_SubscriberHandle()
        self._enabled: list[Any] = []
        try:
            self._start()
        except BaseException:
            _recording_lock.release()
            raise

    def _start(self) -> None:
        try:
            cupti.cuptiSubscribe(self._subscriber, _ignore_callback, None)
        except CudaError as error:
            if "MULTIPLE_SUBSCRIBERS" not in error.name:
                raise
            others = (
                "torch.profiler keeps CUPTI after its first use; Nsight and Compute Sanitizer hold it from the start"
            )
            raise DeviceUnavailable(f"another profiler uses CUPTI in this process ({others}): {error}") from error
        try:
            cupti.cuptiActivityRegisterCallbacks(_buffer_requested, _buffer_completed)
            _buffers.collect()
            for kind in RECORDED:
                cupti.cuptiActivityEnable(kind)
                self._enabled.append(kind)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        for kind in self._enabled:
            cupti.cuptiActivityDisable.unchecked(kind)
        self._enabled.clear()
        cupti.cuptiUnsubscribe.unchecked(self._subscriber)

    def stop(self) -> tuple[Activity, ...]:
        """Stop, and return the activities in the order of their start. The GPU must have finished them."""
        try:
            forced = cupti.CUpti_ActivityFlag.CUPTI_ACTIVITY_FLAG_FLUSH_FORCED
            cupti.cuptiActivityFlushAll(forced)
            dropped = ctypes.c_size_t()
            cupti.cuptiActivityGetNumDroppedRecords(cupti.CUcontext(), 0, ctypes.byref(dropped))
            self.dropped = dropped.value
        finally:
            self._end()
            _recording_lock.release()
        layouts = _layouts()
        found = [_activity(kind, at, layouts) for filled in _buffers.collect() for kind, at in _records(*filled)]
        return tuple(sorted((each for each in found if each is not None), key=lambda each: (each.start, each.end)))


def _records(buffer: int, _memory: object, valid: int) -> Iterator[tuple[int, int]]:
    """The kind and the address of each record of a buffer."""
    record = ctypes.c_void_p()
    following = cupti.cuptiActivityGetNextRecord
    while not (status := following.unchecked(buffer, valid, ctypes.byref(record))):
        at = record.value or 0
        yield ctypes.c_uint32.from_address(at).value, at
    if status != cupti.CUptiResult.CUPTI_ERROR_MAX_LIMIT_REACHED:
        raise following.error(status)


def _layouts() -> dict[int, Any]:
    """The struct of each kind of record that the loaded CUPTI writes."""
    number = ctypes.c_uint32()
    cupti.cuptiGetVersion(ctypes.byref(number))
    version = (number.value // 10000, number.value // 100 % 100)
    names = next(names for since, names in RECORDS if version >= since)
    return {int(kind): getattr(cupti, f"CUpti_Activity{name}") for kind, name in zip(RECORDED, names, strict=True)}


def _activity(kind: int, at: int, layouts: dict[int, Any]) -> Activity | None:
    if kind not in layouts:  # enabled by another profiler
        return None
    record = layouts[kind].from_address(at)
    where = (record.start, record.end, record.deviceId, record.contextId, record.streamId, record.correlationId)
    node = record.graphNodeId
    if kind == KINDS.CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
        grid, block = (record.gridX, record.gridY, record.gridZ), (record.blockX, record.blockY, record.blockZ)
        shared = record.staticSharedMemory + record.dynamicSharedMemory
        return Activity("kernel", _name(record.name), *where, grid, block, shared, record.registersPerThread, 0, node)
    if kind == KINDS.CUPTI_ACTIVITY_KIND_MEMSET:
        return Activity("memset", "memset", *where, bytes=record.bytes, graph_node=node)
    way = cupti.CUpti_ActivityMemcpyKind(record.copyKind).name.removeprefix("CUPTI_ACTIVITY_MEMCPY_KIND_")
    return Activity("memcpy", f"memcpy {way}", *where, bytes=record.bytes, graph_node=node)


def _name(address: int | None) -> str:
    """A kernel's name, demangled if C++'s library is available."""
    mangled = ctypes.string_at(address) if address else b""
    if not mangled.startswith(b"_Z"):
        return mangled.decode(errors="replace")
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return mangled.decode(errors="replace")
    demangle.restype, status = ctypes.c_void_p, ctypes.c_int()
    text = demangle(mangled, None, None, ctypes.byref(status))
    if not text:
        return mangled.decode(errors="replace")
    name = ctypes.string_at(text).decode(errors="replace")
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)
    free(text)
    return name
