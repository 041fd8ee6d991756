"""Default streams where there are several GPUs: their handles mean another stream in another context.

What the driver does with them is seen in tests/gpu/test_two_gpus.py; here a stand-in notes the context of each call.
"""

import ctypes
from types import SimpleNamespace

import pytest

from dispatch import stream as stream_module
from dispatch.device import Device
from dispatch.keys import Arch
from dispatch.stream import NOT_READY, Stream

OWN = 0x5000  # a handle that is an object


class Gpu(Device):
    """A device that knows whether the code inside `here` runs, and notes that for each call of the driver."""

    is_host = False

    def __init__(self, ordinal, is_alone):
        super().__init__(f"cuda:{ordinal}", ordinal, Arch(90), 1)
        self.is_alone, self.here, self.depth, self.calls = is_alone, self, 0, []

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1

    def event(self):
        return ctypes.c_void_p(7)

    def recycle(self, event):
        assert event.value == 7

    def noting(self, name, status=0):
        def call(*_):
            self.calls.append((name, self.depth > 0))
            return status

        return SimpleNamespace(unchecked=call, unchecked_holding_gil=call)


@pytest.fixture
def make(monkeypatch):
    def gpu(is_alone):
        made = Gpu(1, is_alone)
        names = ("cuStreamSynchronize", "cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent")
        driver = {name: made.noting(name) for name in names}
        driver["cuStreamQuery"] = made.noting("cuStreamQuery", NOT_READY)
        monkeypatch.setattr(stream_module, "driver", SimpleNamespace(**driver))
        return made

    return gpu


def ask(stream):
    """All that a stream asks the driver about itself."""
    stream.synchronize()
    assert stream.done() is False
    assert stream.is_capturing() is False


ASKED = ["cuStreamSynchronize", "cuStreamQuery", "cuStreamIsCapturing"]
ORDERED = ["cuEventRecord", "cuStreamWaitEvent"]


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_a_default_stream_of_one_gpu_of_several_is_asked_in_its_context(make, handle):
    gpu = make(is_alone=False)
    ask(Stream.from_handle(gpu, handle))
    assert gpu.calls == [(name, True) for name in ASKED]


@pytest.mark.parametrize(("handle", "is_alone"), [(OWN, False), (OWN, True), (0, True)])
def test_others_are_asked_in_whatever_context(make, handle, is_alone):
    gpu = make(is_alone)
    ask(Stream.from_handle(gpu, handle))
    assert gpu.calls == [(name, False) for name in ASKED]


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("handle", [0, 1, 2])
def test_order_with_a_default_stream_is_made_in_its_context(make, handle, is_alone):
    """Where there is one GPU, too: memory may be freed, and so ordered, on a thread that has no context at all."""
    gpu = make(is_alone)
    own = Stream.from_handle(gpu, OWN)
    own.wait_for(Stream.from_handle(gpu, handle))
    own.wait_for_handle(ctypes.c_void_p(handle))
    own.precede_handle(ctypes.c_void_p(handle))
    assert gpu.calls == [(name, True) for name in ORDERED] * 3


def test_order_between_own_streams_needs_no_context(make):
    gpu = make(is_alone=False)
    Stream.from_handle(gpu, OWN).wait_for(Stream.from_handle(gpu, OWN + 8))
    assert gpu.calls == [(name, False) for name in ORDERED]
