"""Memory that a child maps: what fails leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from dispatch.errors import OutOfMemory
from dispatch.supervise.process import chunks
from dispatch.supervise.process import shared_device as memory

spec = importlib.util.spec_from_file_location("mapped_memory", Path(__file__).with_name("mapped_memory.py"))
mapped = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mapped)
LARGE, held, run, device = mapped.LARGE, mapped.held, mapped.run, mapped.device


class Failing:
    """Has the n-th of all calls of some functions fail with an errno, as the system would."""

    def __init__(self, monkeypatch, number):
        self.at, self.number, self.calls = 0, number, []
        for owner, name in ((os, "memfd_create"), (os, "ftruncate"), (os, "pipe")):
            monkeypatch.setattr(owner, name, self.wrapped(name, getattr(owner, name)))
        real = chunks._libc.mmap

        class Libc:
            munmap = chunks._libc.munmap

            @staticmethod
            def mmap(*arguments):
                if self.fails("mmap"):
                    chunks.ctypes.set_errno(self.number)
                    return chunks.MAP_FAILED
                return real(*arguments)

        monkeypatch.setattr(chunks, "_libc", Libc)

    def fails(self, name):
        self.calls.append(name)
        return len(self.calls) == self.at

    def wrapped(self, name, function):
        def call(*arguments):
            if self.fails(name):
                raise OSError(self.number, os.strerror(self.number))
            return function(*arguments)

        return call


def use_all(device):
    """Allocate, grow, free, trim and allocate once more; nothing of it may fail."""
    kept = {}

    def make(value, nbytes):
        kept[value] = device.empty((nbytes,), np.uint8)
        np.asarray(kept[value])[:100] = np.asarray(kept[value])[-100:] = value
        for number, tensor in kept.items():
            view = np.asarray(tensor)
            assert (view[:100] == number).all()
            assert (view[-100:] == number).all()

    for value in range(1, 4):
        make(value, 1000)
    for value in range(4, 7):
        make(value, LARGE)
    del kept[4], kept[2]
    device.trim()
    make(7, LARGE)
    kept.clear()
    device.trim()
    make(8, 1000)


@pytest.fixture
def little_garbage():
    """Collections look at what a test makes, and not at all that was imported.

    What is frozen stays so: to unfreeze it would undo what conftest.py has frozen for all tests of this process, each
    of whose collections then takes more than a second.
    """
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC], ids=errno.errorcode.get)
@pytest.mark.usefixtures("little_garbage")
def test_whichever_call_fails_nothing_is_lost_and_memory_is_tried_for_again(monkeypatch, number):
    before = held()
    failing = Failing(monkeypatch, number)
    while True:
        failing.at, failing.calls = failing.at + 1, []
        device = memory.SharedHost()
        device.on_chunks_changed = [].append
        use_all(device)  # one failure is no lack: what is free is given back, and it is tried again
        device.close()
        device = None
        gc.collect()
        assert held() == before
        if len(failing.calls) < failing.at:
            break
    assert failing.at > 10


@pytest.mark.exhaustive
def test_a_lasting_lack_is_told_as_such_and_costs_nothing_else(device, monkeypatch):
    small = device.array(np.arange(10))
    before = held()
    for name in ("memfd_create", "ftruncate"):
        with monkeypatch.context() as patch:
            failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            patch.setattr(os, name, lambda *_, failure=failure: (_ for _ in ()).throw(failure))
            for _ in range(3):
                with pytest.raises(OutOfMemory, match=r"MiB of memory that processes can share: .*No space left"):
                    device.empty((LARGE,), "u8")
            assert device.empty((1000,), "u8").nbytes == 1000
        assert held() == before
    assert (small.numpy() == np.arange(10)).all()


@pytest.mark.parametrize(
    "nbytes",
    [1 << 63, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (1 << 50, 1 << 62, (1 << 63) - 1, 1 << 70))],
)
def test_no_size_is_too_large_to_be_refused(device, nbytes):
    before = held()
    with pytest.raises(OutOfMemory):
        device.allocate(nbytes, device.stream())
    assert held() == before


def test_a_defect_while_children_are_told_costs_no_memory(device):
    before = held()

    def broken(_):
        raise RuntimeError("a defect")

    device.on_chunks_changed = broken
    for _ in range(3):
        with pytest.raises(RuntimeError, match="a defect"):
            device.empty((LARGE,), "u8")
    assert held() == before
    assert device.chunks == {}
    device.on_chunks_changed = None
    kept = device.array(np.ones(LARGE, np.uint8))
    del kept
    device.on_chunks_changed = broken
    with pytest.raises(RuntimeError, match="a defect"):
        device.trim()
    assert held() == before


LIMITS = """
import os, resource, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
import dispatch as dp
from dispatch.errors import OutOfMemory

def count():
    return len(os.listdir("/proc/self/fd"))

def limited(kind, value):
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    return soft, hard

sup = dp.Supervisor("host", isolation="process", streams=1, spare=1)
dev = sup.device
a = dev.array(np.eye(8, dtype=np.float32))
request = dp.MatmulRequest(a, a)
sup.submit(request).result(120)
while len(sup._pool._children()) < 3:
    pass  # those that stand by have their connections
before = count()
"""
AS = """
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
old = limited(resource.RLIMIT_AS, size + (20 << 20))
for _ in range(20):
    try:
        dev.empty((100 << 20,), "u8")
    except OutOfMemory:
        continue
    raise SystemExit("there was memory")
resource.setrlimit(resource.RLIMIT_AS, old)
assert count() == before, (count(), before)
sup.submit(request).result(120)
print("fine")
"""
FILES = """
hold = [dev.empty((65 << 20,), "u8") for _ in range(20)]
hold.clear()
pad = []
old = limited(resource.RLIMIT_NOFILE, 128)
try:
    while True:
        pad.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for _ in range(3):
    hold.append(dev.empty((66 << 20,), "u8"))  # none is large enough: one is given back for each
try:
    while True:
        hold.append(dev.empty((67 << 20,), "u8"))
        if len(hold) > 100:
            raise SystemExit("there were descriptors")
except OutOfMemory as error:
    assert "ulimit -n" in str(error), error
sup.submit(request).result(120)
hold.clear()
dev.trim()
assert len(dev.chunks) == 1, len(dev.chunks)
resource.setrlimit(resource.RLIMIT_NOFILE, old)
for fd in pad:
    os.close(fd)
assert count() == before, (count(), before)
sup.close()
dev.close()
names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
left = [os.readlink(name) for name in names if os.path.islink(name)]
assert not any("memfd" in link for link in left), left
print("fine")
"""


@pytest.mark.parametrize("program", [AS, FILES], ids=["address space", "descriptors"])
def test_at_the_limits_of_the_system_nothing_leaks(program):
    assert run(LIMITS + program) == "fine\n"
