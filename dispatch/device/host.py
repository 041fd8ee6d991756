"""The host as a device: NumPy memory, one stream that is always done, the same requests as on a GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from dispatch.device import dlpack
from dispatch.device.device import Device
from dispatch.device.host_memory import check_dense, host_memory, host_shortage, needing_memory, unpacked
from dispatch.device.storage import Storage
from dispatch.device.stream import DeviceStream, Stream
from dispatch.errors import BadRequest
from dispatch.keys import HOST

if TYPE_CHECKING:
    from dispatch.device.layout import Array
    from dispatch.device.tensor import Tensor

__all__ = ["HostDevice"]


class HostDevice(Device):
    """The host as a device: NumPy memory, one stream that is always done, the same requests as on a GPU."""

    is_host = True

    def __init__(self, generation: int) -> None:
        super().__init__("host", 0, HOST, generation)
        self._stream = DeviceStream(self, 0, owned=False)

    def stream(self, *, high_priority: bool = False) -> Stream:
        del high_priority  # there is only one stream
        self.check()
        return self._stream

    def external(self, handle: int) -> Stream:
        return self._stream

    def allocate(self, nbytes: int, stream: Stream) -> Storage:
        if dlpack.exported:
            dlpack.release_consumed()
        # 256 bytes of slack so that host tensors are aligned as device memory is.
        memory = host_memory(nbytes + 256, np.uint8)
        base = (memory.ctypes.data + 255) // 256 * 256
        return Storage(self, base, nbytes, stream, _let_go, memory)

    def view(self, tensor: Tensor) -> Array:
        self.check(tensor)
        layout = tensor.layout
        if layout.dtype.bits < 8:
            raise BadRequest("tensor", str(layout), "elements of whole bytes", "numpy() copies packed ones")
        window = (ctypes.c_uint8 * (layout.high - layout.low)).from_address(tensor.ptr + layout.low)
        # An attribute of the ctypes array keeps the storage alive, and the memory even if the storage drops it.
        window.keep = tensor.storage, tensor.storage.keep  # type: ignore[attr-defined]
        dtype = layout.dtype.numpy
        steps = tuple(s * dtype.itemsize for s in layout.strides)
        view: Array = np.ndarray(layout.shape, dtype, memoryview(window), -layout.low, steps)
        view.flags.writeable = not layout.readonly
        return view

    def copy_in(self, tensor: Tensor, array: Array) -> None:
        self.check_written(tensor, array)
        if tensor.dtype.bits < 8:
            pairs = self.packed(tensor, array)
            ctypes.memmove(tensor.ptr, pairs.ctypes.data, pairs.nbytes)
        else:
            self.view(tensor)[...] = array

    def copy_out(self, tensor: Tensor) -> Array:
        if tensor.dtype.bits >= 8:
            try:
                copy: Array = self.view(tensor).copy()
            except MemoryError as error:
                raise host_shortage(error) from error
            return copy
        check_dense(tensor)
        with needing_memory:
            return unpacked(tensor, np.frombuffer(ctypes.string_at(tensor.ptr, tensor.nbytes), np.uint8))

    def clear(self, ptr: int, nbytes: int, tensor: Tensor) -> None:
        ctypes.memset(ptr, 0, nbytes)

    def synchronize(self) -> None:
        self.check()


def _let_go(storage: Storage) -> None:
    """Nothing to do: the memory is `storage.keep`, which is freed with the storage."""
