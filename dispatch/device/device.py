"""Device: the base class of `cuda:N` (cuda.py) and `host` (host.py).

A device owns its context, its memory and its tensors' layouts, for one generation. The generation ends when the device
is closed or lost: its tensors are stale, and the next `device()` (registry.py) makes another one. Nothing here runs a
kernel; copies are enqueued on the current stream of the calling thread.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from cudabind._fork import anew
from dispatch.checks import check_dtype, check_fits, check_shape, check_type, convert_array
from dispatch.device import dlpack
from dispatch.device.async_copy import Copy
from dispatch.device.disposal import members
from dispatch.device.host_memory import array_kind, host_memory, needing_memory, packed
from dispatch.device.layout import Array, Layout, c_strides
from dispatch.device.stream import ExecutorLike, Stream, current, relaxed
from dispatch.device.tensor import Tensor
from dispatch.errors import BadRequest, DispatchError, StaleTensor
from dispatch.keys import U8, Arch, Dtype

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from typing_extensions import Self

    from dispatch.device.storage import Storage

__all__ = ["Device"]

MAX_EXECUTORS = 32  # of one thread, on our own streams; each has handles, plans and a workspace
MAX_EXTERNAL_EXECUTORS = 16  # of one thread, on streams of other libraries
_all: weakref.WeakSet[Device] = weakref.WeakSet()
MAX_LAYOUTS = 1 << 16  # beyond it all interned layouts are dropped; plans for the old ones are made again


class Device:
    """A GPU or the host; `device(name)` returns the live one with that name."""

    is_host: ClassVar[bool]
    open_executor: ClassVar[Callable[[Stream], ExecutorLike]]  # set by prepare.py, which knows the executor classes
    read: ClassVar[Callable[[str, Any, Device | None], Any]]  # set by sources.py: reads the argument of `array`
    context: AbstractContextManager[None] = nullcontext()  # `with device.context:` makes its CUDA context current
    is_alone = True  # this process sees no other GPU
    live: ClassVar[dict[str, Device]] = {}  # the devices that `device()` returns (registry.py)
    opening: ClassVar[Any] = threading.RLock()  # held while `live` changes

    def __init__(self, name: str, ordinal: int, arch: Arch, generation: int) -> None:
        self.name, self.ordinal, self.arch, self.generation = name, ordinal, arch, generation
        self.alive = True
        self.fault: DispatchError | None = None
        self._layouts: dict[tuple[Any, ...], Layout] = {}
        # For allocations by executors: size and layout at a multiple of 256 bytes, by shape, strides and dtype.
        self.output_layouts: dict[tuple[Any, ...], tuple[int, Layout]] = {}
        self._executors: weakref.WeakSet[Any] = weakref.WeakSet()
        self.supervisors: weakref.WeakSet[Any] = weakref.WeakSet()  # `close` lets them finish first
        self._lock = threading.RLock()  # a finalizer may run inside it, and close streams or see a fault
        anew(self, "_lock", threading.RLock)
        _all.add(self)

    def after_fork(self) -> None:
        """In a forked child: drop everything that only the parent can use."""

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse copies and pickles, also of tensors, requests and bound calls: memory would be freed twice."""
        raise TypeError(
            f"a {type(self).__name__} belongs to this process: neither it nor objects on it can be copied or pickled. "
            "Pass the elements instead: x.numpy()"
        )

    def refuse_pickles(self) -> None:
        """Raise TypeError unless this is the host, whose tensors are copied by `copy` and `pickle`."""
        if not self.is_host:
            raise TypeError(
                f"a tensor on {self} belongs to this process: it and requests with it cannot be copied or pickled. "
                "Use x.numpy() for the elements, x.copy() for a copy on the GPU, from_dlpack(x) in other libraries"
            )

    # -- what subclasses implement ------------------------------------------------------------------------------
    def stream(self, *, high_priority: bool = False) -> Stream:
        """A new stream; waiting kernels of a stream of high priority start before those of others."""
        raise DispatchError(f"{type(self).__name__} makes no streams")

    def external(self, handle: int) -> Stream:
        """Another library's stream; the caller guarantees that the handle is alive."""
        raise DispatchError(f"{type(self).__name__} has no streams of other libraries")

    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        """Uninitialized memory, ordered on a stream; OutOfMemory if there is not enough."""
        raise DispatchError(f"{type(self).__name__} has no memory")

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        """Overwrite a tensor with an array of its shape and dtype, on the current stream."""

    def copy_out(self, tensor: Tensor) -> Array:
        """The elements of a tensor as a new array; waits for what writes it."""
        raise DispatchError(f"{type(self).__name__} has no memory")

    def pinned(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """An uninitialized NumPy array for fast and asynchronous copies to and from this device.

        On a GPU it is page-locked memory from a pool; on the host it is an ordinary array.
        """
        self.check()
        return host_memory(*array_kind(shape, dtype))

    def copy_in_async(self, tensor: Tensor, array: Array) -> Copy:
        """Begin `copy_in`, of an array of any dtype."""
        with needing_memory:
            self.copy_in(tensor, convert_array("source", array, tensor.dtype))
        return Copy(None, None, tensor)

    def copy_out_async(self, tensor: Tensor, out: Array | None) -> Copy:
        """Begin `copy_out`, into `out` if that is given."""
        array = self.copy_out(tensor)
        if out is not None:
            out[...] = array
        return Copy(None, None, array if out is None else out)

    def view(self, tensor: Tensor) -> Array:
        """A NumPy array that shares the memory of a tensor on the host."""
        raise DispatchError(f"{type(self).__name__} has no memory that NumPy could view")

    def unreadable(self, tensor: Tensor) -> str:
        """The reason why the elements of a tensor cannot be read now; "" if they can."""
        if self.fault is not None:
            return "lost: its device has faulted"
        if not self.alive:
            return "stale: its device was closed, and its memory was freed"
        executor, streams = current.executor, tensor.storage.users()
        if executor is not None and executor.stream.device is self:
            streams.add(executor.stream)
        captured = any(stream.external and not stream.closed and stream.is_capturing() for stream in streams)
        return "its elements cannot be read: a stream is under capture" if captured else ""

    def peek(self, tensor: Tensor, low: int, high: int) -> Array:
        """The bytes from `low` to `high`, relative to a tensor's pointer; does not end captures of other streams."""
        layout = Layout(self, U8, (high - low,), (1,), 1, readonly=True)  # rarely needed, so not interned
        with relaxed():
            return self.copy_out(Tensor(tensor.storage, tensor.ptr + low, layout))

    def bytes_in_use(self) -> int | None:
        """The bytes that tensors of this device hold; None if they are not counted."""
        return None

    def synchronize(self) -> None:
        """Wait for all work on the device; raises the error that the work ended in."""
        raise DispatchError(f"{type(self).__name__} has no work")

    def retire(self, stream: Stream) -> None:
        """Record the work of a stream that is about to be destroyed: memory it used is freed after that work."""

    def withdraw(self, stream: Stream) -> None:
        """Drop the cached blocks of a stream that was closed or has become known to other libraries."""

    def dispose(self, handle: ctypes.c_void_p) -> None:
        """Destroy a closed stream of this device, once no thread can still be using its handle."""

    def park(self, storage: Storage) -> None:
        """Keep another library's memory alive until work on it is done; on the host work is always done."""

    def event(self) -> ctypes.c_void_p:
        """An event without timing, from a pool; `recycle` returns it."""
        raise DispatchError(f"{type(self).__name__} has no events")

    def recycle(self, event: ctypes.c_void_p) -> None:
        """Return an event to the pool."""
        raise DispatchError(f"{type(self).__name__} has no events")

    def recorded(self, stream: Stream) -> ctypes.c_void_p:
        """An event, recorded after all work that is enqueued on a stream so far."""
        raise DispatchError(f"{type(self).__name__} has no events")

    def refuse_capture(self, what: str, stream: Stream | None = None) -> None:
        """BadRequest if `stream`, or this thread's current one, is under the caller's capture; never on the host."""

    def keep_until(self, event: ctypes.c_void_p, keep: Any) -> None:
        """Keep an object alive until an event has completed; then the event is recycled."""
        raise DispatchError(f"{type(self).__name__} has no events")

    def activate(self) -> None:
        """Give the calling thread a CUDA context if it has none; nothing to do on the host."""

    # -- state --------------------------------------------------------------------------------------------------
    def check(self, *tensors: Tensor) -> None:
        """Raise unless the device is alive and healthy, and the memory of the tensors still exists."""
        for tensor in tensors:
            owner = tensor.layout.device
            if not owner.alive and owner.fault is None:
                raise StaleTensor(
                    f"{tensor.layout} belongs to generation {owner.generation} of {owner.name}, which was closed and"
                    f" its memory freed. Create the tensor again on dispatch.device({owner.name!r})"
                )
            tensor.check_within()
        if self.fault is not None:
            raise self.fault
        if not self.alive:
            raise StaleTensor(f"generation {self.generation} of {self.name} was closed; device() returns a new one")

    def check_written(self, tensor: Tensor, array: Array | None = None) -> None:
        """Raise unless a tensor of this device may be overwritten, and an array, if given, has its shape and dtype."""
        check_type("tensor", tensor, Tensor)
        self.check(tensor)
        layout = tensor.layout
        if layout.device is not self:
            raise BadRequest("tensor", f"one on {layout.device!r}", f"one on {self!r}")
        if layout.readonly:
            raise BadRequest("tensor", "read-only memory", "writable memory", "copy it: dev.array(x)")
        if layout.meets_itself:
            raise BadRequest("tensor", f"a view {layout}", "elements that have different addresses", "some share one")
        if array is not None and (array.shape, array.dtype) != (layout.shape, layout.dtype.numpy):
            raise BadRequest("array", f"{array.dtype}{list(array.shape)}", f"{layout.dtype}{list(layout.shape)}")

    def look(self, tensor: Tensor) -> None:
        """Raise TaintedTensor for a tensor whose elements must not be read."""

    def fail(self, status: int, function: str) -> NoReturn:
        """Raise the error of a driver status; a sticky one also marks the device as lost."""
        raise DispatchError(f"{function} returned status {status}")

    def close(self) -> None:
        """Wait for all work, including that of supervisors, close the executors and end this generation; idempotent."""
        dlpack.release_consumed(everything=True)
        for supervisor in members(self.supervisors):
            supervisor.finish()
        with Device.opening:
            if not self.alive:
                return
            self.alive = False
            if self.live.get(self.name) is self:
                del self.live[self.name]
        for executor in self.executors():
            executor.close()

    # -- executors and layouts --------------------------------------------------------------------------------------
    def executor(self, stream: Stream | None = None) -> Any:
        """The calling thread's executor on `stream`, or on its current stream of this device; made at first use.

        With `stream`, the executor becomes the thread's current one only if the thread has no open one.
        """
        present: Any = current.executor
        if stream is None and present is not None and present.stream.device is self:
            if not present.closed:
                return present
            if current.entered:  # in a `with` block of a stream that was closed
                present.check()
        becomes_current = stream is None or ((present is None or present.closed) and stream.is_ours)
        if stream is None:
            stream = current.own_streams.get(self)
            if stream is None:
                self.check()
                _forget_closed_devices()
                stream = current.own_streams[self] = self.stream()
        executor = current.executors.get(stream)
        if executor is None:
            executor = current.executors[stream] = type(self).open_executor(stream)
            with self._lock:
                self._executors.add(executor)
            if len(current.executors) > MAX_EXTERNAL_EXECUTORS:
                _forget_an_executor(stream)
        if becomes_current and not current.entered:  # not inside a `with stream:` block
            current.executor = executor
        return executor

    def executors(self) -> list[Any]:
        """The executors that threads have opened so far."""
        with self._lock:
            return list(self._executors)

    def __enter__(self) -> Self:
        """Make this device current in the block: work is enqueued on this thread's current stream of it."""
        self.check()
        before, executor = current.executor, self.executor()  # outside of `with`, `executor()` sets the current one
        current.entered.append(before)
        current.executor = executor
        return self

    def __exit__(self, *_: object) -> None:
        current.executor = current.entered.pop()

    def forget_plans(self) -> None:
        """Make every executor select its rows again."""
        for executor in self.executors():
            executor.forget()

    def layout(
        self, dtype: Dtype, shape: tuple[int, ...], strides: tuple[int, ...], ptr: int, readonly: bool = False
    ) -> Layout:
        """The interned layout of a view at an address; strides count elements and are not checked here."""
        alignment = min(ptr & -ptr, 256) or 256
        key = (dtype.cuda, shape, strides, alignment, readonly)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts, self.output_layouts = {}, {}
            layout = self._layouts[key] = Layout(self, dtype, shape, strides, alignment, readonly)
        return layout

    # -- tensors ------------------------------------------------------------------------------------------------
    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """An uninitialized C-order tensor; `dtype` is a name ("bf16", "half"), a Dtype, or NumPy's or torch's."""
        self.check()
        kind = check_dtype("dtype", dtype)
        extents = check_shape("shape", shape, kind.bits)
        storage = self.allocate((math.prod(extents) * kind.bits + 7) // 8, self.executor().stream)
        return Tensor(storage, storage.base, self.layout(kind, extents, c_strides(extents), storage.base))

    def zeros(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Tensor:
        """A C-order tensor of zeros."""
        tensor = self.empty(shape, dtype)
        self.fill_zero(tensor)
        return tensor

    def fill_zero(self, tensor: Tensor) -> None:
        """Set every element of a tensor to zero on the current stream; bytes between its elements stay as they are."""
        self.check_written(tensor)
        if tensor.layout.fills_bytes:
            self.clear(tensor.ptr + tensor.layout.low, tensor.nbytes, tensor)
        else:
            self.copy_in(tensor, np.zeros(tensor.shape, tensor.dtype.numpy))

    def clear(self, ptr: int, nbytes: int, tensor: Tensor) -> None:
        """Set bytes of a tensor to zero, on the current stream."""
        raise DispatchError(f"{type(self).__name__} has no memory")

    def packed(self, tensor: Tensor, array: Array) -> Array:
        """An array in the format of a tensor's memory: unchanged, or 4-bit elements packed two to a byte.

        A last odd element of a view shares its byte with the element after the view, which keeps its value.
        """
        pairs = packed(tensor, array)
        if tensor.dtype.bits == 4 and tensor.size % 2:
            ptr = tensor.ptr + tensor.nbytes - 1
            last = Tensor(tensor.storage, ptr, self.layout(U8, (1,), (1,), ptr))
            pairs[-1] |= self.copy_out(last)[0] & 0xF0
        return pairs

    def array(self, source: Any, dtype: Any = None) -> Tensor:
        """Copy anything that `numpy.asarray` takes, or a tensor of torch, CuPy or JAX; `dtype` converts it first.

        Python numbers that an integer dtype ("i8" is int8) cannot hold raise OutOfRange, an OverflowError as in NumPy.
        """
        array = type(self).read("source", source, self)
        if isinstance(array, Tensor):
            return array if dtype is None else array.astype(dtype, copy=False)
        kind = check_dtype("dtype", array.dtype if dtype is None else dtype)
        check_fits("source", source, array, kind)
        tensor = self.empty(array.shape, kind)
        with needing_memory:
            self.copy_in(tensor, convert_array("source", array, kind))
        return tensor

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        state = "" if self.alive else ", closed" if self.fault is None else ", lost"
        return f"<{self.name} ({self.arch}), generation {self.generation}{state}>"


anew(Device, "opening", threading.RLock)


def _forget_closed_devices() -> None:
    """Drop the thread's streams and executors on closed devices; they would live as long as the thread."""
    current.own_streams = {device: stream for device, stream in current.own_streams.items() if device.alive}
    current.executors = {stream: one for stream, one in current.executors.items() if stream.device.alive}
    current.by_handle = {key: one for key, one in current.by_handle.items() if one.stream.device.alive}


def _forget_an_executor(stream: Stream) -> None:
    """Drop the thread's oldest executor of that kind if it has too many: streams are often dropped unclosed."""
    own_streams = current.own_streams.values()
    candidates = [other for other in current.executors if other.is_ours == stream.is_ours and other not in own_streams]
    if len(candidates) > (MAX_EXECUTORS if stream.is_ours else MAX_EXTERNAL_EXECUTORS):
        open_blocks = {executor.stream for executor in (current.executor, *current.entered) if executor is not None}
        oldest = next((other for other in candidates if other is not stream and other not in open_blocks), None)
        if oldest is not None:
            executor: Any = current.executors.pop(oldest)
            if not executor.prepared:  # else it lives as long as its prepared calls
                executor.close()


def _after_fork() -> None:
    for each in list(_all):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)  # after the handler that renews the locks, which this one uses
