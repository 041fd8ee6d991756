"""Reads the sources of `dev.array(x)`: anything that NumPy accepts, and other libraries' tensors that it cannot read.

NumPy is tried first. It cannot read tensors on a GPU, nor torch's of bf16 or fp8, nor those that require grad. `read`
is set as an attribute of Device, because importing it there would be circular.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch.checks import as_array, names_arguments
from dispatch.device.device import Device
from dispatch.device.frameworks.frameworks import framework_of
from dispatch.device.operators import point_elsewhere
from dispatch.device.stream import NULL_CONTEXT
from dispatch.errors import BadRequest

if TYPE_CHECKING:
    from dispatch.device.tensor import Tensor

__all__ = ["read"]


def read(name: str, source: Any, device: Device | None = None) -> Any:
    """The elements of an object as an array, or as a tensor if they are on this GPU and NumPy cannot read them."""
    try:
        return as_array(name, source)
    except BadRequest:
        framework = framework_of(type(source))
        if framework is None or isinstance(source, np.ndarray):
            raise
    tensor: Tensor = framework.tensor(name, framework.readable(source))
    stream = framework.stream(tensor.device)
    with NULL_CONTEXT if stream is None else stream:
        return tensor.copy() if tensor.device is device and not device.is_host else tensor.numpy()


Device.read = staticmethod(read)
point_elsewhere(Device, ("arange", "asarray", "eye", "full", "linspace", "ones"), "of_device")
for _name in ("__init__", "array", "empty", "zeros"):
    setattr(Device, _name, names_arguments(getattr(Device, _name)))
