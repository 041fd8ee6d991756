"""What communicators of NCCL ask of a device and of its driver."""

import ctypes
from types import SimpleNamespace

from dispatch.device.stream import NOT_READY, NULL_CONTEXT


class Gpu:
    """What communicators ask of a device, whose events are done when the test says so."""

    is_host, alive, fault = False, True, None

    def __init__(self):
        self.context, self.done, self.events = NULL_CONTEXT, True, 0

    def event(self):
        self.events += 1
        return ctypes.c_void_p(self.events)

    def recycle(self, event):
        assert event.value

    def __str__(self):
        return "cuda:0"


class Driver:
    """The driver's two functions that notes of calls need."""

    def __init__(self, gpu):
        self.cuEventRecord = SimpleNamespace(unchecked=lambda _event, _stream: 0)
        self.cuEventQuery = SimpleNamespace(unchecked=lambda _: 0 if gpu.done else NOT_READY)
