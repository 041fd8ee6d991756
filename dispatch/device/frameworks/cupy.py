"""CuPy's arrays as operands: on its current stream, results from its memory pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cupy

from dispatch.device.frameworks.framework import Adopted, Framework
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.stream import Stream
    from dispatch.device.tensor import Tensor

__all__ = ["FRAMEWORK"]

Shape = tuple[int, ...]
BYTE = 8  # bits


class CuPy(Framework):
    """CuPy."""

    name = "cupy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, cupy.ndarray)

    def tensor(self, operand: str, given: Any) -> Tensor:
        dtype = Dtype.by_numpy.get(given.dtype)
        if dtype is None or dtype.bits < BYTE:
            raise BadRequest(operand, f"an array of {given.dtype}", "a dtype of this library", "x.astype(…)")
        item = dtype.numpy.itemsize
        if any(stride % item for stride in given.strides):
            raise BadRequest(operand, f"strides of {given.strides} bytes", f"multiples of {item}", "x.copy()")
        home = device_of(f"cuda:{given.device.id}")
        strides = tuple(stride // item for stride in given.strides)
        return Adopted(self, home, self.stream(home), given, given.data.ptr).tensor(dtype, given.shape, strides)

    def stream(self, device: Device) -> Stream:
        return device.external(cupy.cuda.get_current_stream(device.ordinal).ptr)

    def allocate(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Tensor | None:
        if dtype.bits < BYTE or dtype.numpy.isbuiltin != 1:
            return None  # CuPy need not know such a dtype; where it does, it takes over memory of ours
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        item = dtype.numpy.itemsize
        with cupy.cuda.Device(device.ordinal):
            memory = cupy.cuda.alloc((reach + 1) * item if 0 not in shape else 0)
            made = cupy.ndarray(shape, dtype.numpy, memory, tuple(stride * item for stride in strides))
        return Adopted(self, device, self.stream(device), made, made.data.ptr).tensor(dtype, shape, strides)

    def wrapped(self, tensor: Tensor) -> Any:
        return cupy.from_dlpack(tensor)


FRAMEWORK = CuPy()
