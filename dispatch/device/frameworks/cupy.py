"""CuPy's arrays as operands: on its current stream, results from its memory pool."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import cupy

from dispatch.device.frameworks.framework import Code, ForeignStorage, Framework
from dispatch.device.layout import c_strides
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from dispatch.device.device import Device
    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor

__all__ = ["FRAMEWORK"]

Shape = tuple[int, ...]
BYTE = 8  # bits


class CuPy(Framework):
    """CuPy."""

    name = "cupy"
    code = Code(
        kinds=frozenset((cupy.ndarray,)),
        scope={"_stream": cupy.cuda.get_current_stream},
        ordinal="{x}.data.device_id",
        handle="_stream(_ordinal).ptr",
        pointer="{x}.data.ptr",
        layout="{x}.dtype, {x}.shape, {x}.strides, {x}.data.device_id",
    )

    def owns(self, kind: type) -> bool:
        return issubclass(kind, cupy.ndarray)

    def tensor(self, operand: str, given: Any) -> Tensor:
        dtype = Dtype.by_numpy.get(given.dtype)
        if dtype is None or dtype.bits < BYTE:
            raise BadRequest(operand, f"an array of {given.dtype}", "a dtype of this library", "x.astype(…)")
        item = dtype.numpy.itemsize
        if any(stride % item for stride in given.strides):
            raise BadRequest(operand, f"strides of {given.strides} bytes", f"multiples of {item}", "x.copy()")
        gpu = device_of(f"cuda:{given.device.id}")
        strides = tuple(stride // item for stride in given.strides)
        return ForeignStorage(self, gpu, self.stream(gpu), given, given.data.ptr).tensor(dtype, given.shape, strides)

    def is_on_gpu(self, given: Any) -> bool:
        return True

    def stream(self, device: Device) -> Stream:
        return device.external(cupy.cuda.get_current_stream(device.ordinal).ptr)

    def is_current(self, device: Device, handle: int) -> bool:
        return bool(cupy.cuda.get_current_stream(device.ordinal).ptr == handle)

    def lasting(self, device: Device) -> int | None:
        """The legacy default stream; CuPy's other streams are destroyed with their objects."""
        return None if cupy.cuda.get_current_stream(device.ordinal).ptr else 0

    def maker(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Callable[[], Any] | None:
        """Only with a single GPU, because CuPy allocates on the current one, and only for outputs in C order."""
        is_dense = 0 in shape or strides == c_strides(shape)
        if dtype.bits < BYTE or dtype.numpy.isbuiltin != 1 or not device.is_alone or not is_dense:
            return None
        return partial(cupy.ndarray, shape, dtype.numpy)

    def allocate(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Tensor | None:
        if dtype.bits < BYTE or dtype.numpy.isbuiltin != 1:
            return None  # CuPy may lack such a dtype; if it has it, `wrapped` makes its array over our memory
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        item = dtype.numpy.itemsize
        with cupy.cuda.Device(device.ordinal):
            memory = cupy.cuda.alloc((reach + 1) * item if 0 not in shape else 0)
            array = cupy.ndarray(shape, dtype.numpy, memory, tuple(stride * item for stride in strides))
        return ForeignStorage(self, device, self.stream(device), array, array.data.ptr).tensor(dtype, shape, strides)

    def wrapped(self, tensor: Tensor) -> Any:
        return cupy.from_dlpack(tensor)


FRAMEWORK = CuPy()
