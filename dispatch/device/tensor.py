"""Tensor: a typed, strided view of device or host memory that knows whether its memory is still there.

Storage owns memory and knows which streams use it; Layout is the interned shape of a view, which plans are keyed by;
Tensor is a pointer, a layout and a storage. Nothing here launches work; copies are enqueued on the current stream.
"""

from __future__ import annotations

import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from cudabind._fork import anew
from dispatch.checks import as_array, converted, shown
from dispatch.device import dlpack
from dispatch.device.stream import order
from dispatch.errors import BadIndex, BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from dispatch.device.device import Device
    from dispatch.device.external import ExternalStream
    from dispatch.device.pinned import Copy
    from dispatch.device.stream import Stream
    from dispatch.keys import Dtype

__all__ = ["Layout", "Storage", "Tensor"]

Array = np.ndarray[Any, np.dtype[Any]]
COUNTED = 1 << 16  # elements of a view whose axes are woven into one another, each of which is looked at


class Layout:
    """Device, dtype, shape and strides (in elements) of a view, and the alignment of its pointer in bytes, up to 256.

    Interned by its device: equal layouts are nearly always one object, so a plan is found by identity. `low` and
    `high` bound the view in bytes around its pointer: it touches [ptr + low, ptr + high).
    """

    __slots__ = ("_meets", "alignment", "device", "dtype", "high", "low", "readonly", "shape", "size", "strides")

    def __init__(
        self,
        device: Device,
        dtype: Dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        alignment: int,
        readonly: bool,
    ) -> None:
        self.device, self.dtype, self.shape, self.strides = device, dtype, shape, strides
        self.alignment, self.readonly = alignment, readonly
        self._meets: bool | None = None
        reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
        self.size = math.prod(shape)
        self.low = sum(r for r in reach if r < 0) * dtype.bits // 8 if self.size else 0
        self.high = (sum(r for r in reach if r > 0) * dtype.bits + dtype.bits + 7) // 8 if self.size else 0

    @property
    def is_contiguous(self) -> bool:
        """Whether the view is dense in C order."""
        return self.size == 0 or all(
            extent == 1 or stride == dense
            for extent, stride, dense in zip(self.shape, self.strides, c_strides(self.shape), strict=True)
        )

    @property
    def fills_bytes(self) -> bool:
        """Whether its elements, in whatever order, are all there is in the bytes that they lie in."""
        axes = [(abs(stride), extent) for stride, extent in zip(self.strides, self.shape, strict=True) if extent > 1]
        step = 1
        for stride, extent in sorted(axes):
            if stride != step:
                return self.size == 0
            step *= extent
        return step * self.dtype.bits % 8 == 0

    @property
    def meets_itself(self) -> bool:
        """Whether two of its elements lie at one address, as in broadcast views and windows that overlap.

        Exact up to `COUNTED` elements; of larger ones those count whose axes are woven into one another, too.
        """
        if self._meets is None:
            self._meets = self._do_meet()
        return self._meets

    def _do_meet(self) -> bool:
        axes = [(abs(stride), extent) for stride, extent in zip(self.strides, self.shape, strict=True) if extent > 1]
        reach, is_nested = 0, True
        for stride, extent in sorted(axes):
            is_nested = is_nested and stride > reach
            reach += (extent - 1) * stride
        if is_nested or self.size == 0:
            return False
        if self.size > COUNTED or any(stride == 0 for stride, _ in axes):
            return True
        places = np.zeros(1, np.int64)
        for stride, extent in axes:
            places = np.add.outer(places, stride * np.arange(extent)).ravel()
        return len(np.unique(places)) < len(places)

    def frame(self) -> Array:
        """A NumPy array of this shape and these strides over no memory: NumPy's indexing rules without the data."""
        item = self.dtype.numpy.itemsize  # a packed 4-bit element counts as one byte here
        blank = np.empty(1, f"V{item}")  # as_strided knows no ml_dtypes
        return as_strided(blank, self.shape, tuple(s * item for s in self.strides))

    def __str__(self) -> str:
        text = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return text if self.is_contiguous else f"{text} strides ({', '.join(map(str, self.strides))})"

    __repr__ = __str__


def c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a dense C-order array."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def packed(tensor: Tensor, array: Array) -> Array:
    """4-bit elements two to a byte, the first in the low half; other dtypes as they are."""
    if tensor.dtype.bits != 4:
        return array
    check_dense(tensor)
    nibbles = np.ascontiguousarray(array).view(np.uint8).ravel() & 0xF
    nibbles = np.append(nibbles, np.uint8(0)) if nibbles.size % 2 else nibbles
    return np.asarray(nibbles[0::2] | nibbles[1::2] << 4)


def unpacked(tensor: Tensor, pairs: Array) -> Array:
    """The elements of a 4-bit tensor from its bytes."""
    nibbles = np.stack([pairs & 0xF, pairs >> 4], axis=-1).ravel()[: tensor.size]
    return np.asarray(nibbles.view(tensor.dtype.numpy).reshape(tensor.shape))


def check_dense(tensor: Tensor) -> None:
    """BadRequest unless a tensor of packed elements can be copied whole."""
    if not tensor.layout.is_contiguous:
        raise BadRequest("tensor", str(tensor.layout), "a dense tensor, for 4-bit elements are copied whole")


NOBODY: AbstractSet[Stream] = frozenset()


class Storage:
    """Owner of one piece of memory, and of the order in which streams use it.

    Guarantees: `owner` is the one stream that has used the memory since its last writer, or None when several have;
    then `writer` is the last that wrote it and `readers` those that already wait for that write. A use on another
    stream enqueues the event waits it needs, and the memory is freed only behind all its users.
    """

    __slots__ = ("__weakref__", "base", "device", "free", "keep", "lent", "nbytes", "owner", "readers", "writer")
    # Held while uses are noted, and ordered behind streams that must not be destroyed meanwhile. What is collected in
    # between may be a user's, and use tensors as it goes.
    ordering = threading.RLock()

    def __init__(
        self, device: Device, base: int, nbytes: int, stream: Stream, free: Callable[[Storage], None], keep: Any = None
    ) -> None:
        self.device, self.base, self.nbytes, self.free = device, base, nbytes, free
        self.keep = keep  # what the memory lives in, where that is not the device's pool
        self.owner: Stream | None = stream
        self.writer = stream
        self.readers: AbstractSet[Stream] = NOBODY
        self.lent: dict[ExternalStream | None, int] | None = None  # to consumers on these streams; None: one not named

    def use(self, stream: Stream, *, write: bool) -> None:
        """Order a use on `stream` behind the uses on other streams it conflicts with."""
        if self.owner is stream or (not write and self.is_behind(stream)):
            return
        with self.ordering:
            if write:
                for other in self.users():
                    stream.wait_for_uses(other)
                self.owner = self.writer = stream
                self.readers = NOBODY
            elif stream is not self.writer and stream not in self.readers:
                stream.wait_for_uses(self.writer)
                self.readers = {*self.readers, stream}
                self.owner = None
            order.epoch += 1

    def is_behind(self, stream: Stream) -> bool:
        """Whether what is enqueued on `stream` is behind the last write already."""
        return stream is self.writer or stream in self.readers

    def users(self) -> set[Stream]:
        """The streams that the memory may still be in use on."""
        return {self.writer, *self.readers}

    def lend(self, stream: ExternalStream | None) -> None:
        """Note that a consumer may use this memory on a stream of its own, until it gives it back."""
        with self.ordering:
            lent, identity = dict(self.lent or {}), 0 if stream is None else stream.identity
            if lent.get(stream, identity) != identity:
                lent[None] = 0  # the handle meant another stream then, which has work and no name any more
            self.lent = {**lent, stream: identity}

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        try:
            free = self.free
        except AttributeError:  # Ctrl-C has come before the first line of __init__
            return
        free(self)


anew(Storage, "ordering", threading.RLock)


class Tensor:
    """A strided view of typed memory on a device, with NumPy's semantics of shape, strides (bytes) and basic indexing.

    Made by `Device.array`, `empty`, `zeros`, by `from_dlpack`, or as a view of another; never by calling the class.
    Using one whose device was closed or replaced raises StaleTensor before any pointer is touched.
    """

    __slots__ = ("__weakref__", "layout", "ptr", "storage")
    __array_priority__ = 1000  # NumPy operators give way: there is no silent copy to the host

    def __init__(self, storage: Storage, ptr: int, layout: Layout) -> None:
        self.storage, self.ptr, self.layout = storage, ptr, layout

    @property
    def device(self) -> Device:
        return self.layout.device

    @property
    def dtype(self) -> Dtype:
        return self.layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides in bytes, as NumPy has them (elements for the packed 4-bit type)."""
        return tuple(s * (self.dtype.itemsize or 1) for s in self.layout.strides)

    @property
    def ndim(self) -> int:
        return len(self.layout.shape)

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, not of the memory they are spread over."""
        return (self.layout.size * self.dtype.bits + 7) // 8

    @property
    def generation(self) -> int:
        """The generation of the device this memory belongs to; a closed or replaced device has the next one."""
        return self.layout.device.generation

    @property
    def T(self) -> Tensor:
        """The view with all axes reversed."""
        return self._view(self.layout.frame().T)

    @property
    def mT(self) -> Tensor:
        """The view with the last two axes exchanged; BadRequest under two axes."""
        if self.ndim < 2:
            raise BadRequest("mT", str(self.layout), "at least two axes")
        return self._view(np.swapaxes(self.layout.frame(), -1, -2))

    def transpose(self, *axes: int | tuple[int, ...]) -> Tensor:
        """The view with the axes in another order, as NumPy has it; all reversed where none is named.

        `x.transpose(0, 3, 1, 2)` of an array (N, H, W, C) is one (N, C, H, W) whose channels are last in memory.
        """
        try:
            return self._view(self.layout.frame().transpose(*axes))
        except Exception as error:  # noqa: BLE001  # as above
            raise BadRequest("axes", shown(axes), f"each axis of {self.layout} once", str(error)) from None

    def __getitem__(self, index: Any) -> Tensor:
        """A view by NumPy's basic indexing (integers, slices, None, ...); index arrays and masks are refused."""
        entries = index if isinstance(index, tuple) else (index,)
        for entry in entries:
            if not (entry is None or entry is Ellipsis or isinstance(entry, (int, np.integer, slice))) or isinstance(
                entry, bool
            ):
                expected = "basic indexing (integers, slices, None, ...)"
                raise BadRequest("index", shown(entry), expected, "use numpy() first")
        if not any(entry is Ellipsis for entry in entries):
            entries = (*entries, Ellipsis)  # an integer for every axis then still gives a view, not a read
        frame = self.layout.frame()
        try:
            view = frame[entries]
        except (IndexError, ValueError, TypeError, OverflowError) as error:
            used = sum(isinstance(entry, (int, np.integer, slice)) for entry in entries)
            one_gap = sum(entry is Ellipsis for entry in entries) == 1
            kind = BadIndex if isinstance(error, IndexError) and one_gap and 0 < used <= self.ndim else BadRequest
            raise kind("index", shown(index), f"one of {self.layout}", str(error)) from None
        return self._view(view, frame)

    def reshape(self, *shape: int | tuple[int, ...]) -> Tensor:
        """The view of another shape; BadRequest where that needs a copy."""
        frame = self.layout.frame()
        try:
            return self._view(np.reshape(frame, shape[0] if len(shape) == 1 else shape, copy=False), frame)
        except Exception as error:  # noqa: BLE001  # an object's own __index__ may raise anything
            raise BadRequest("shape", shown(shape), f"a view of {self.layout}", str(error)) from None

    def _view(self, view: Array, frame: Array | None = None) -> Tensor:
        item = self.dtype.numpy.itemsize
        offset = 0
        if frame is not None and view.size:
            offset = (view.__array_interface__["data"][0] - frame.__array_interface__["data"][0]) // item
        strides = tuple(s // item for s in view.strides)
        if offset * self.dtype.bits % 8:
            hint = "begin at an even one, or copy: dev.array(x.numpy()[...], 'f4e2m1')"
            raise BadRequest("view", f"one that begins with element {offset} of {self.layout}", "whole bytes", hint)
        ptr = self.ptr + offset * self.dtype.bits // 8
        return Tensor(self.storage, ptr, self.device.layout(self.dtype, view.shape, strides, ptr, self.layout.readonly))

    def numpy(self) -> Array:
        """Copy out as a NumPy array, waiting for what writes the tensor; raises what that ended in."""
        self.device.check(self)
        self.device.look(self)
        return self.device.copy_out(self)

    def copy_from(self, source: Any) -> Tensor:
        """Overwrite with an array or tensor of the same shape, converting the dtype on the host; returns itself."""
        self.device.copy_in(self, converted("source", self._source(source), self.dtype))
        return self

    def _source(self, source: Any) -> Array:
        """What is to be copied here, as an array of this shape."""
        self.device.check_written(self)
        array = as_array("source", source)
        if array.shape != self.shape:
            raise BadRequest("source", f"shape {array.shape}", f"shape {self.shape}")
        return array

    def numpy_async(self, out: Array | None = None) -> Copy:
        """Begin to copy out, into page-locked memory (`Device.pinned`) or into `out`; its `result()` is the array.

        Only a tensor that is dense in C order is copied while the host goes on; others are waited for.
        """
        self.device.check(self)
        self.device.look(self)
        if out is not None:
            self._check_target(out)
        return self.device.copy_out_async(self, out)

    def _check_target(self, out: Any) -> None:
        given = f"a {type(out).__name__}"
        if isinstance(out, np.ndarray):
            fits = (out.shape, out.dtype) == (self.shape, self.dtype.numpy)
            if fits and out.flags.c_contiguous and out.flags.writeable:
                return
            given = f"{out.dtype}[{', '.join(map(str, out.shape))}]"
        expected = f"a C-order array of {self.layout} that may be written"
        raise BadRequest("out", given, expected, "dev.pinned(shape, dtype) makes one")

    def copy_from_async(self, source: Any) -> Copy:
        """Begin to overwrite with an array of the same shape; its `result()` is this tensor.

        From an array of `Device.pinned` of the same dtype nothing is copied on the host, so leave that as it is until
        the Copy has ended; of any other a copy is made first. Work on this device is ordered behind it; where the
        device is that of a supervisor with isolation="process", wait for it before you submit what uses the tensor.
        """
        return self.device.copy_in_async(self, self._source(source))

    def item(self) -> Any:
        """The only element as a Python number, waiting for it."""
        self.device.check(self)
        if self.size != 1:
            raise BadRequest("item", str(self.layout), "a tensor of one element", "numpy() gives all of them")
        return self.numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False and not (self.device.is_host and self.dtype.bits >= 8):
            raise ValueError(f"a {self.dtype} tensor on {self.device} cannot become a NumPy array without a copy")
        shared = self.device.is_host and self.dtype.bits >= 8  # packed elements have no view
        array = self.numpy() if copy or not shared else self.device.view(self)
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """The DLPack capsule of this memory, for `torch.from_dlpack` and others; their stream waits for the writer."""
        return dlpack.export(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA Array Interface, version 3, for CuPy, Numba and others; AttributeError on the host."""
        return dlpack.cuda_array_interface(self)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor of no axes has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        state = "" if self.device.alive else ", stale"
        return f"Tensor({self.layout} on {self.device}{state})"
