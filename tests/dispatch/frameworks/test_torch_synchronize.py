"""torch.cuda.synchronize while other threads record: over a device whose context notes what it is asked."""

import threading

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dispatch.device.device import Device  # noqa: E402
from dispatch.device.frameworks.torch_synchronize import excluding_recordings  # noqa: E402
from dispatch.device.recordings import Recordings  # noqa: E402
from dispatch.errors import DeviceFault  # noqa: E402

FAILED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED


class Gpu:
    """The part of a GPU that is asked; its context tells of a failure while anything is recorded."""

    def __init__(self):
        self.fault, self.recordings, self.recording, self.status, self.waits = None, Recordings(), 0, 0, 0
        self.context = self

    def wait(self, recordings):
        if isinstance(self.status, Exception):
            raise self.status
        with recordings.exclude():
            self.waits += 1
            return FAILED if self.recording else self.status


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setitem(Device.live, "cuda:3", gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return gpu


@pytest.fixture
def told():
    return []


@pytest.fixture
def synchronize(told):
    def original(device=None):
        """Torch's own words."""
        told.append(device)

    return excluding_recordings(original)


@pytest.mark.parametrize("device", [None, 3, "cuda", "cuda:3", torch.device("cuda", 3)], ids=str)
def test_it_waits_for_the_device_that_is_named(device, gpu, synchronize, told):
    assert synchronize(device) is None
    assert (gpu.waits, told) == (1, [])


def test_it_waits_for_no_recording_under_way_and_torch_is_not_asked(gpu, synchronize, told):
    began, may_end = threading.Event(), threading.Event()

    def record():
        with gpu.recordings.record():
            gpu.recording += 1
            began.set()
            assert may_end.wait(60)
            gpu.recording -= 1

    recorder = threading.Thread(target=record)
    waiting = threading.Thread(target=synchronize)
    recorder.start()
    assert began.wait(60)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    may_end.set()
    for thread in (recorder, waiting):
        thread.join()
    assert (gpu.waits, told) == (1, [])


def test_errors_are_told_by_torch(gpu, synchronize, told):
    gpu.status = 700
    synchronize("cuda:3")
    gpu.status = DeviceFault("lost")
    synchronize(3)
    gpu.fault = gpu.status
    synchronize(3)
    assert gpu.waits == 1
    assert told == ["cuda:3", 3, 3]


@pytest.mark.parametrize("device", ["cuda:5", 7, "nothing", object()], ids=["cuda:5", "7", "nothing", "object"])
def test_torch_waits_for_devices_that_are_not_in_use_here_and_refuses_others(device, gpu, synchronize, told):
    synchronize(device)
    assert gpu.waits == 0
    assert told == [device]


def test_it_keeps_its_name_and_words(synchronize):
    assert (synchronize.__name__, synchronize.__doc__) == ("original", "Torch's own words.")
