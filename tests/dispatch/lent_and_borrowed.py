"""Memory of ours that another library holds, and memory of another library that is ours to use."""

from __future__ import annotations

from dispatch.device import dlpack
from dispatch.device.external_memory import _hand_back
from dispatch.device.storage import Storage
from dispatch.device.tensor import Tensor

SHAPE = (4, 8)


def lend(tensor, handle):
    """Give a tensor to a consumer on a stream; returns what the consumer holds."""
    dlpack._lend(tensor, handle)
    return [tensor.storage]


def borrow(dev, keep):
    """A tensor over memory of another library, on the current stream."""
    memory = dev.empty(SHAPE)
    storage = Storage(dev, memory.ptr, 0, dev.executor().stream, _hand_back, (memory, keep))
    return Tensor(storage, memory.ptr, memory.layout)


class Gone:
    """Says when it is given back."""

    def __init__(self):
        self.is_back = False

    def holder(self):
        outer = self

        class Holder:
            def __del__(self):
                outer.is_back = True

        return Holder()
