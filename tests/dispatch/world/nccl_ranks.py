"""Communicators of several ranks of a process, over a stand-in for NCCL, and what runs requests by them."""

import importlib.util
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

import dispatch as dp
from dispatch.device.host import HostDevice
from dispatch.device.stream import NULL_CONTEXT
from dispatch.keys import Arch
from dispatch.libraries.nccl.communicator import NcclCommunicator
from dispatch.libraries.nccl.config import NcclConfig
from dispatch.table.select import select


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "nccl_stand_in.py")


@pytest.fixture
def library(monkeypatch):
    made, gpu = stand_in.install(monkeypatch)
    made.gpu = gpu
    # Requests are on the host, and so is the device of their communicators: it has what a GPU's has, for that long.
    for name in ("context", "event", "recycle"):
        value = NULL_CONTEXT if name == "context" else getattr(gpu, name)
        monkeypatch.setattr(HostDevice, name, value, raising=False)
    yield made
    # What still ends a communicator on a thread of its own would meet the next test's stand-in.
    waited(lambda: all("nccl" not in thread.name or thread.name == "nccl monitor" for thread in threading.enumerate()))


@pytest.fixture
def executor():
    import ctypes

    return SimpleNamespace(target=ctypes.c_void_p(stand_in.STREAM), captured=False)


def ranks(library, count, deadline=20.0):
    """Communicators of so many ranks, on the host's device."""
    rendezvous = stand_in.Rendezvous(count)
    device = dp.device("host")
    handles = [stand_in.nccl.ncclComm_t(library._made(rendezvous, rank)) for rank in range(count)]
    return [NcclCommunicator(h, rank, count, device, NcclConfig(), deadline=deadline) for rank, h in enumerate(handles)]


def runner(executor):
    """What runs a request by the row of a GPU."""

    def run(request):
        row = select(request, Arch(90))
        plan = row.call(request, executor, row)
        outputs = request.device.executor().outputs(request)
        plan.hold((*(tensor for _, tensor, _ in request.tensors()), *outputs.values()))  # as executors do
        plan.enqueue(request.arguments(outputs))
        return request.give(outputs)

    return run


def on_threads(function, comms):
    with ThreadPoolExecutor(len(comms)) as pool:
        return [each.result(60) for each in [pool.submit(function, comm) for comm in comms]]


def waited(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(1e-3)
