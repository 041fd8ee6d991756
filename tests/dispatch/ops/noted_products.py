"""A device of host memory with an sm_90's rows, whose executor notes what its products are given."""

from __future__ import annotations

import ctypes
import threading
from contextlib import nullcontext

import numpy as np
import pytest

from cudabind.sys import cublasLt as lt
from dispatch.device.host import HostDevice
from dispatch.execute.cuda_executor import CudaExecutor
from dispatch.execute.executor import Executor
from dispatch.execute.launches import Launches
from dispatch.keys import Arch
from dispatch.ops.matmul import cublaslt, exact, exact_kernels


class NoContext(nullcontext):
    def push(self):
        return 0

    def pop(self):
        return 0


class Gpu(HostDevice):
    """Host memory under the rows of an sm_90, with a stream that is nobody else's."""

    is_host = False

    def __init__(self):
        super().__init__(1)
        self.name, self.arch = "cuda:7", Arch(90)
        self._stream.external = False
        self.context = NoContext()


class NotingExecutor(CudaExecutor):
    """Notes the arguments, reads and writes of every run."""

    versions = {"cublasLt": (13, 1, 0)}  # noqa: RUF012
    workspace = type("W", (), {"nbytes": 1 << 25, "c_ptr": None})

    def __init__(self, stream):
        Executor.__init__(self, stream)
        self.handles["cublasLt"] = lt.cublasLtHandle_t()
        self.target, self.runs = None, []

    def enqueue(self, plan, arguments, reads, writes):
        self.runs.append((arguments, reads, writes))

    def forget(self):
        Executor.forget(self)

    def close(self):
        Executor.close(self)


Gpu.open_executor = NotingExecutor


@pytest.fixture
def dev(monkeypatch):
    monkeypatch.setattr(cublaslt, "heuristic", lambda *_, **__: [lt.cublasLtMatmulHeuristicResult_t()])
    monkeypatch.setattr(cublaslt, "kernels", lambda *_: ("one",))
    monkeypatch.setattr(exact, "functions", lambda *_: dict.fromkeys(exact_kernels.NAMES, 1))
    monkeypatch.setattr(exact_kernels, "_launch_function", lambda: lambda *_: 0)
    device = Gpu()
    yield device
    device.close()


def operands(dev, dtype="f32"):
    shapes = {"a": (32, 16), "b": (16, 48), "c": (32, 48), "bias": (48,), "out": (32, 48)}
    return {name: dev.array(np.ones(shape), dtype) for name, shape in shapes.items()}


def taken_by(dev):
    return dev.executor().runs


class CapturedExecutor(NotingExecutor):
    """Its stream is being captured by the caller."""

    captured = True
    enqueue = CudaExecutor.enqueue
    _workspace, _pages, _zeros, _scalars = None, (), (), ()

    def __init__(self, stream):
        super().__init__(stream)
        self.launches, self._calling, self._calls = Launches(stream, None), set(), threading.RLock()
        self._mode = ctypes.c_int()
        self._c_mode = ctypes.byref(self._mode)

    def preparing(self):
        return nullcontext()

    def record(self, plan, arguments):
        raise AssertionError("a record was made while the caller captured")

    recorded = record
