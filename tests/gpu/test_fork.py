"""Processes forked from one that uses a GPU, and shared memory of a GPU under views: told clearly, and kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 250

FORKS = """
import faulthandler, gc, os, signal, sys, traceback, warnings
warnings.simplefilter("ignore")
import numpy as np
import dispatch as dp
from dispatch.errors import DeviceUnavailable, DispatchError

faulthandler.register(signal.SIGALRM, chain=True)

def refused(call):
    try:
        call()
    except DispatchError as error:
        assert "os.fork" in str(error), repr(error)
    else:
        raise AssertionError(f"{call} was not refused")

def on_host():
    host = dp.device("host")
    a = host.array(np.eye(3, dtype=np.float32))
    assert np.asarray(dp.matmul(a, a))[0, 0] == 1
    with dp.Supervisor("host", streams=1, isolation="process") as own:
        a = own.device.array(np.eye(3, dtype=np.float32))
        assert own.submit(dp.MatmulRequest(a, a)).result(60)[0, 0].item() == 1

def forked(work, exit):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
USED = """
dev = dp.device("cuda:0")
x = dev.array(np.eye(64, dtype=np.float32))
for _ in range(3):
    y = dp.matmul(x, x, bias=None)
call = dp.prepare(dp.MatmulRequest(x, x))
for _ in range(3):
    call()
own = dev.stream()
with own:
    z = dp.matmul(x, x)
copy = x.numpy_async()
sup = dp.Supervisor("cuda:0", streams=2)
isolated = dp.Supervisor("cuda:0", streams=1, isolation="process")
s = isolated.device.array(np.eye(8, dtype=np.float32))

def work():
    for each in (
        lambda: dp.device(), lambda: dp.device("cuda:0"), lambda: dp.matmul(x, x), call, x.numpy, x.copy_from_async,
        lambda: dev.empty((3,)), dev.synchronize, lambda: dp.Supervisor("cuda:0"), lambda: s.numpy(),
        lambda: isolated.device.empty((3,)), lambda: sup.submit(dp.MatmulRequest(x, x)), lambda: np.asarray(y),
        lambda: x.__dlpack__(), lambda: isolated.submit(dp.MatmulRequest(s, s)),
    ):
        if each == x.copy_from_async:
            each = lambda: x.copy_from_async(np.eye(64, dtype=np.float32))
        refused(each)
    on_host()
    globals().pop("call"), globals().pop("z"), globals().pop("own"), globals().pop("copy"), globals().pop("s")
    gc.collect()
    sup.close()
    isolated.close()
    dev.close()
    isolated.device.close()

for exit in (os._exit, sys.exit):
    forked(work, exit)
assert np.allclose(dp.matmul(x, x).numpy(), np.eye(64)) and np.allclose(np.asarray(call()), np.eye(64))
assert sup.submit(dp.MatmulRequest(x, x)).result(60).numpy()[0, 0] == 1
assert isolated.submit(dp.MatmulRequest(s, s)).result(60).numpy()[0, 0] == 1
assert np.allclose(copy.result(), np.eye(64))
sup.close()
isolated.close()
print("fine")
"""
ASKED = """
from dispatch.device.gpus import is_available
assert is_available()

def work():
    refused(dp.device)
    refused(lambda: dp.device("cuda:0"))
    on_host()

for exit in (os._exit, sys.exit):
    forked(work, exit)
assert dp.device().name == "cuda:0"
print("fine")
"""
TORCH = """
import torch
torch.ones(3, device="cuda").sum().item()
""" + ASKED.replace("from dispatch.device.gpus import is_available\nassert is_available()\n", "")
BEFORE = """
def work():
    dev = dp.device("cuda:0")
    x = dev.array(np.eye(64, dtype=np.float32))
    assert np.allclose(dp.matmul(x, x).numpy(), np.eye(64))

forked(work, os._exit)
work()
print("fine")
"""


def run(program):
    done = subprocess.run(
        [sys.executable, "-c", FORKS + program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), f"{done.returncode} {done.stdout} {done.stderr[-4000:]}"


@pytest.mark.parametrize("program", [USED, ASKED, BEFORE], ids=["used", "asked for", "not yet used"])
def test_a_forked_process_is_told_that_it_has_no_gpu(program):
    run(program)


def test_a_forked_process_is_told_so_whoever_used_the_gpu():
    pytest.importorskip("torch", reason="torch is not installed")
    run(TORCH)


VIEWS = """
import torch
sup = dp.Supervisor("cuda:0", streams=1, isolation="process")
dev = sup.device
from dispatch.supervise.process import chunks
ends, unmap = [], chunks.driver.cuMemUnmap

class Unmap:
    @staticmethod
    def unchecked(*arguments):
        ends.append(unmap.unchecked(*arguments))

chunks.driver.cuMemUnmap = Unmap
tensor = dev.array(np.arange(1 << 20, dtype=np.float32))
view = torch.from_dlpack(tensor)
sup.close()
torch.cuda.synchronize()
dev.close()
assert view[12345].item() == 12345 and view.double().sum().item() == (1 << 20) * ((1 << 20) - 1) / 2
view.fill_(3)
other = torch.full((1 << 26,), 7, dtype=torch.uint8, device="cuda")
assert (view == 3).all().item()
del tensor
assert view[-1].item() == 3 and ends == []
del view, other
gc.collect()
assert ends == [0], ends
print("fine")
"""
CROWDED = """
import resource
sup = dp.Supervisor("cuda:0", streams=1, isolation="process")
dev = sup.device
kept = dev.array(np.eye(8, dtype=np.float32))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = lambda: dp.device("cuda:0").memory()
pads = []
resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
try:
    while True:
        pads.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for _ in range(20):
    try:
        dev.empty((65 << 20,), "u8")
    except dp.errors.OutOfMemory as error:
        told = str(error)
    else:
        raise AssertionError("there was a descriptor")
for pad in pads:
    os.close(pad)
assert len(dev.chunks) == 1, len(dev.chunks)
large = dev.empty((65 << 20,), "u8")
assert sup.submit(dp.MatmulRequest(kept, kept)).result(60).numpy()[0, 0] == 1
sup.close()
dev.close()
assert "ulimit" in told, told
print("fine")
"""


def test_views_of_a_gpus_shared_memory_keep_it():
    pytest.importorskip("torch", reason="torch is not installed")
    run(VIEWS)


def test_no_descriptor_for_a_gpus_shared_memory_is_a_lack_of_memory():
    run(CROWDED)
