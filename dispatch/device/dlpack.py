"""Exchange of tensors with other libraries without a copy, by DLPack and the CUDA Array Interface: import and export.

`Tensor` and `from_dlpack` call it. It follows the DLPack specification (version 1.1) and the CUDA Array Interface
(version 3). It never copies an element, and preserves the stream order on both sides.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import itertools
import sys
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch import keys
from dispatch.checks import shown
from dispatch.device.gpus import check_handle
from dispatch.errors import BadRequest, DispatchError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.tensor import Tensor
    from dispatch.keys import Dtype

__all__ = ["cuda_array_interface", "device_of", "export", "exported", "import_from", "release_consumed"]

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
LEGACY_DEFAULT_STREAM = 1
READ_ONLY = 1

# fmt: off
CODES: dict[Dtype, tuple[int, int]] = {  # DLDataTypeCode and bits of one element
    keys.I8:     (0, 8),   keys.I32:    (0, 32),  keys.I64:  (0, 64),
    keys.U8:     (1, 8),   keys.U32:    (1, 32),  keys.U64:  (1, 64),
    keys.F16:    (2, 16),  keys.F32:    (2, 32),  keys.F64:  (2, 64),
    keys.BF16:   (4, 16),  keys.C64:    (5, 64),  keys.C128: (5, 128),  keys.BOOL: (6, 8),
    keys.F8E4M3: (10, 8),  keys.F8E5M2: (12, 8),  keys.E8M0: (14, 8),
}
# fmt: on
DTYPES = {code: dtype for dtype, code in CODES.items()}


class DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class DLManagedTensor(ctypes.Structure):
    """The capsule "dltensor" of DLPack before 1.0."""

    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))
    capsule, used = b"dltensor", b"used_dltensor"
    flags = 0


class DLManagedTensorVersioned(ctypes.Structure):
    """The capsule "dltensor_versioned" of DLPack 1.0 and newer."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", DLTensor),
    )
    capsule, used = b"dltensor_versioned", b"used_dltensor_versioned"


Managed = DLManagedTensor | DLManagedTensorVersioned


def _python(name: str, restype: Any, *argtypes: Any) -> Any:
    return ctypes.PYFUNCTYPE(restype, *argtypes)((name, ctypes.pythonapi))


capsule_new = _python("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
capsule_pointer = _python("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
capsule_is = _python("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
capsule_rename = _python("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)

# The structs that consumers hold, by number. A consumer releases one by calling its deleter: from any thread, with or
# without the GIL, while an exception is being raised, even after Python has ended. A Python function as the deleter
# would lose the user's exception and keep the memory. So the deleter is libc's `time`, which only overwrites the first
# 8 bytes of the struct. Before, these bytes hold a version or an address, never a time: `release_consumed` detects the
# change.
exported: dict[int, _Export] = {}
_numbers = itertools.count(1)
_uses = 0  # calls of `release_consumed` since it last checked all of `exported`

# Capsules that are not consumed yet. They have no destructor, for the same reason: `release_consumed` finds those that
# were dropped unconsumed. There is no lock, because another thread may hold it when a destructor runs or the process
# forks: every step is one atomic operation of a dictionary.
_unconsumed: dict[int, Any] = {}


class _Export:
    """A struct that was passed to a consumer, and the objects that keep its memory alive."""

    __slots__ = ("_begins", "_first", "_managed", "keeps")

    def __init__(self, managed: Managed, *keeps: object) -> None:
        self._managed, self.keeps = managed, keeps
        self._first = ctypes.c_int64.from_buffer(managed)
        self._begins = self._first.value
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))  # the consumer's deleter writes to it

    @property
    def is_over(self) -> bool:
        return self._first.value != self._begins

    def release(self) -> None:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._managed))


@cache
def _deleter() -> int | None:
    return ctypes.cast(ctypes.CDLL(None).time, ctypes.c_void_p).value


def _references(capsules: dict[int, Any], number: int) -> int:
    capsule = capsules.get(number)
    return sys.getrefcount(capsule)


_watching = False  # whether the garbage collector calls `release_consumed`
UNHELD = _references({0: object()}, 0)  # the reference count of an object that only the dictionary holds


def release_consumed(*, everything: bool = False) -> None:
    """Release what consumers have released: called when memory is allocated, lent or counted, and by the collector.

    A call checks eight structs on average: it checks all of n only at every n/8-th call, or with `everything`.
    """
    global _uses
    _uses += 1  # two threads at once may count as one, which delays the check by a call
    if _uses * 8 < len(exported) and not everything:
        return
    _uses = 0
    for number in list(_unconsumed):
        capsule = _unconsumed.get(number)
        if capsule is None:  # another thread has removed it
            continue
        if not any(capsule_is(capsule, kind.capsule) for kind in (DLManagedTensor, DLManagedTensorVersioned)):
            _unconsumed.pop(number, None)  # consumed: the struct's deleter will be called
            continue
        del capsule
        if _references(_unconsumed, number) <= UNHELD and _unconsumed.pop(number, None) is not None:
            exported.pop(number).release()
    for number, each in exported.copy().items():
        if each.is_over and exported.pop(number, None) is not None:
            each.release()


def _after_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and exported:
        release_consumed(everything=info["generation"] == 2)  # a full collection


def _watch_collections() -> None:
    """Register with the garbage collector, only at the first export: a Ctrl-C inside its callbacks is lost."""
    global _watching
    _watching = True
    gc.callbacks.append(_after_collection)


@atexit.register
def _stop_watching() -> None:
    with suppress(ValueError):  # another library may have cleared the list
        gc.callbacks.remove(_after_collection)


def device_of(tensor: Tensor) -> tuple[int, int]:
    """DLPack's (device type, device number) of a tensor."""
    return (CPU, 0) if tensor.device.is_host else (CUDA, tensor.device.ordinal)


def export(
    tensor: Tensor,
    *,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: bool | None,
    backwards: bool = False,
) -> Any:
    """A DLPack capsule over a tensor's memory; the consumer's stream waits for the work that uses it.

    BufferError, as the protocol requires, for a dtype that DLPack lacks, for a copy, and for another device. Negative
    strides are exported only with `backwards`, for consumers that support them: torch (2.13) does not, and ends the
    process.
    """
    tensor.device.check(tensor)
    tensor.device.look(tensor)
    given: dict[str, Any] = {"max_version": max_version, "dl_device": dl_device}
    for name, pair in given.items():
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(one, int) for one in pair)
        if pair is not None and not is_pair:
            raise BadRequest(name, shown(pair), "a tuple of two integers, or None")
    if tensor.dtype not in CODES:
        raise BufferError(f"DLPack has no code for a packed {tensor.dtype} tensor; numpy() copies it to the host")
    if copy or (dl_device is not None and tuple(dl_device) != device_of(tensor)):
        raise BufferError(
            "this tensor can be exported only without a copy and from its own device; numpy() copies it to the host"
        )
    if tensor.layout.low < 0 and not backwards:
        raise BufferError(
            f"not every library supports negative strides, which {tensor.layout} has: copy it with x.copy()"
        )
    if not tensor.device.is_host and stream == -1:  # the consumer orders its work itself, on an unknown stream
        tensor.storage.lend(None)
    elif not tensor.device.is_host:
        _lend(tensor, LEGACY_DEFAULT_STREAM if stream is None else stream)
    release_consumed()
    kind = DLManagedTensor if max_version is None or max_version[0] < 1 else DLManagedTensorVersioned
    if kind is DLManagedTensor and tensor.layout.readonly:
        raise BufferError("a read-only tensor needs a consumer that supports DLPack 1.0 or newer")
    if not _watching:
        _watch_collections()
    number = next(_numbers)
    managed = _managed(tensor, kind)
    exported[number] = _Export(managed, tensor, tensor.storage.keep)
    capsule = capsule_new(ctypes.addressof(managed), kind.capsule, None)
    _unconsumed[number] = capsule
    return capsule


def _lend(tensor: Tensor, handle: int) -> None:
    """Make a consumer's stream wait for all users of the memory, which will be freed only after that stream's work."""
    stream: Any = tensor.device.external(check_handle("stream", handle))
    with tensor.storage.ordering:
        for user in tensor.storage.users():
            stream.wait_for_uses(user)
    if stream.waiting and stream.identity >= 0:  # memory lent to it earlier waits until the stream is used again
        with stream.claimed():  # entering the block releases that memory
            pass
    tensor.storage.lend(stream)


def _managed(tensor: Tensor, kind: type[Managed]) -> Managed:
    layout = tensor.layout
    ndim = len(layout.shape)
    managed = kind()
    if isinstance(managed, DLManagedTensorVersioned):
        managed.major, managed.minor = 1, 1
        managed.flags = READ_ONLY if layout.readonly else 0
    inner = managed.dl_tensor
    inner.data, inner.ndim = tensor.ptr, ndim
    inner.device = DLDevice(*device_of(tensor))
    inner.dtype = DLDataType(*CODES[layout.dtype], 1)
    # The ctypes pointer keeps its array alive, and the struct keeps the pointer.
    inner.shape = ctypes.cast((ctypes.c_int64 * ndim)(*layout.shape), ctypes.POINTER(ctypes.c_int64))
    inner.strides = ctypes.cast((ctypes.c_int64 * ndim)(*layout.strides), ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _deleter()
    return managed


class Imported:
    """Memory of another library: pointer, device, dtype, shape and strides; released when this object dies."""

    def __init__(self, capsule: Any) -> None:
        for kind in (DLManagedTensorVersioned, DLManagedTensor):
            if capsule_is(capsule, kind.capsule):
                break
        else:
            raise BadRequest(
                "from_dlpack",
                "a capsule that was consumed before or is not a DLPack capsule",
                "an unused DLPack capsule",
            )
        self._managed: Managed = kind.from_address(capsule_pointer(capsule, kind.capsule))
        capsule_rename(capsule, kind.used)  # from here on this library must call the deleter
        inner = self._managed.dl_tensor
        self.device = (inner.device.type, inner.device.id)
        self.ptr = (inner.data or 0) + inner.byte_offset
        self.shape = tuple(inner.shape[: inner.ndim])
        self.strides = tuple(inner.strides[: inner.ndim]) if inner.strides else None
        self.readonly = bool(self._managed.flags & READ_ONLY)
        code = (inner.dtype.code, inner.dtype.bits)
        if code not in DTYPES or inner.dtype.lanes != 1:
            raise BadRequest(
                "from_dlpack", f"DLPack type code {code[0]} of {code[1]} bits", _names(), "convert it first"
            )
        self.dtype = DTYPES[code]

    def __del__(self) -> None:
        managed = getattr(self, "_managed", None)
        if managed is not None and managed.deleter:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))


def _names() -> str:
    return "one of " + ", ".join(dtype.name for dtype in CODES)


def import_from(source: Any, stream: int | None, lend: Callable[..., Any] | None = None) -> Imported:
    """Import the memory of any object with `__dlpack__`; the producer makes `stream` (None on the host) wait for it.

    `lend` replaces `__dlpack__`, for tensors of this library.
    """
    try:
        lend = source.__dlpack__ if lend is None else lend
        try:
            capsule = lend(stream=stream, max_version=(1, 1))
        except TypeError:  # a producer from before DLPack 1.0
            capsule = lend(stream=stream)
    except (DispatchError, RuntimeError):  # such as a fault of the producer's device
        raise
    except Exception as error:
        raise BadRequest(
            "from_dlpack", f"a {type(source).__name__}", "an object whose __dlpack__ exports its memory", str(error)
        ) from error
    return Imported(capsule)


def place_of(source: Any) -> tuple[int, int]:
    """The location of a producer's memory, as reported by the producer: (device type, device number)."""
    try:
        kind, number = map(int, source.__dlpack_device__())
    except Exception as error:
        expected = "an object whose __dlpack_device__ returns (device type, device number)"
        raise BadRequest("from_dlpack", f"a {type(source).__name__}", expected, str(error)) from error
    return kind, number


def cuda_array_interface(tensor: Tensor) -> dict[str, Any]:
    """The dictionary of version 3 of the interface; AttributeError, as it requires, if a tensor cannot have it."""
    if tensor.device.is_host:
        raise AttributeError("a tensor on the host has no __cuda_array_interface__")
    tensor.device.check(tensor)
    tensor.device.look(tensor)
    if tensor.dtype.numpy.kind == "V" or tensor.dtype.numpy.isbuiltin != 1:
        raise AttributeError(f"__cuda_array_interface__ has no type string for {tensor.dtype}; use from_dlpack")
    stream = tensor.device.executor().stream  # lives as long as this thread; the users' streams may not
    with tensor.storage.ordering:
        for user in tensor.storage.users():
            stream.wait_for_uses(user)
        tensor.storage.lend(None)
    return {
        "version": 3,
        "shape": tensor.shape,
        "typestr": np.dtype(tensor.dtype.numpy).str,
        "data": (tensor.ptr, tensor.layout.readonly),
        "strides": None if tensor.layout.is_contiguous else tensor.strides,
        "stream": stream.handle or LEGACY_DEFAULT_STREAM,
    }
