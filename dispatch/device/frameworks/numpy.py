"""NumPy's arrays as operands, on the host; results are new arrays."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import check_unmasked
from dispatch.device.frameworks.framework import ForeignStorage, Framework
from dispatch.device.registry import device
from dispatch.errors import BadRequest
from dispatch.keys import Dtype

if TYPE_CHECKING:
    from dispatch.device.device import Device
    from dispatch.device.tensor import Tensor

    Shape = tuple[int, ...]

__all__ = ["FRAMEWORK"]

WIDE = 8  # bits; narrower elements take a byte each in NumPy, and half a byte in a Tensor


class NumPy(Framework):
    """NumPy: arrays of the host."""

    name = "numpy"

    def owns(self, kind: type) -> bool:
        return issubclass(kind, np.ndarray)

    def tensor(self, operand: str, given: Any) -> Tensor:
        check_unmasked(operand, given)
        if isinstance(given, np.matrix):
            raise BadRequest(operand, "a numpy.matrix", "an array", "np.asarray(x)")
        dtype = Dtype.by_numpy.get(given.dtype)
        if not given.dtype.isnative and given.dtype.newbyteorder("=") in Dtype.by_numpy:
            order, hint = "the other byte order", "x.astype(x.dtype.newbyteorder('=')), or dev.array(x), which converts"
            raise BadRequest(operand, f"an array of {given.dtype}, {order}", "one in this machine's byte order", hint)
        if dtype is None or dtype.bits < WIDE:
            supported = ", ".join(name for name, kind in Dtype.by_name.items() if kind.bits >= WIDE)
            raise BadRequest(operand, f"an array of {given.dtype}", f"one of {supported}", "convert it: x.astype(…)")
        item = given.dtype.itemsize
        if any(stride % item for stride in given.strides):
            raise BadRequest(operand, f"strides of {given.strides} bytes", f"multiples of {item}", "x.copy()")
        host = device("host")
        storage = ForeignStorage(self, host, host.stream(), given, given.__array_interface__["data"][0])
        strides = tuple(stride // item for stride in given.strides)
        return storage.tensor(dtype, given.shape, strides, readonly=not given.flags.writeable)

    def allocate(self, device: Device, shape: Shape, strides: Shape, dtype: Dtype) -> Tensor | None:
        if dtype.bits < WIDE:
            return None
        reach = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) if prod(shape) else 0
        steps = tuple(step * dtype.itemsize for step in strides)
        array = np.ndarray(shape, dtype.numpy, np.empty(reach, dtype.numpy), 0, steps)
        storage = ForeignStorage(self, device, device.stream(), array, array.__array_interface__["data"][0])
        return storage.tensor(dtype, shape, strides)

    def wrapped(self, tensor: Tensor) -> Any:
        return tensor.numpy() if tensor.dtype.bits < WIDE else tensor.device.view(tensor)


FRAMEWORK = NumPy()
