"""An executor without a GPU for plans of einsum, over stand-ins of cuTENSOR and cuBLASLt."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import accepts
from dispatch.errors import NoRow, Refused
from dispatch.ops.contraction import sequence
from dispatch.table import contract_cublaslt, cutensor
from dispatch.table.einsum import GPU_ROWS


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
stand_in = loaded(HERE.parent / "cutensor_stand_in.py")
products = loaded(HERE.parent / "cublaslt_stand_in.py")
shapes_of = loaded(HERE.parent / "contraction_shapes.py")
TOTAL = 1 << 30  # bytes of the device


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def executor(monkeypatch, dev):
    """An executor whose plans of steps are those of the first row for GPUs that takes them."""
    made = stand_in.executor_of(monkeypatch)
    products.install(monkeypatch, made)
    made.rows, made.versions = (*contract_cublaslt.GPU_ROWS, *cutensor.GPU_ROWS), {}
    made.planned = []

    def plan(request):
        tried = []
        for row in made.rows:
            if row.op == request.op and accepts(row, request, request.signature()):
                try:
                    made.planned.append((row.library, request.op, request.spec))
                    return row.call(request, made, row)
                except Refused as refusal:
                    tried.append((row.name, [refusal]))
        raise NoRow(request.describe(), [], f"{len(tried)} refused")

    made.plan = plan
    made.device.layout = dev.layout
    memory = SimpleNamespace(
        cuMemGetInfo=lambda: (TOTAL, TOTAL),
        cuMemsetD8Async=lambda address, value, nbytes, _: ctypes.memset(address, value, nbytes),
    )
    monkeypatch.setattr(sequence, "driver", memory)
    monkeypatch.setattr(sequence, "Storage", lambda *given: SimpleNamespace(device=dev, base=given[1], nbytes=given[2]))
    made.device.allocate = lambda nbytes, _: on(dev, stand_in.Memory(nbytes))
    return made


def on(device, memory):
    memory.device = device
    return memory


def row_of(dtype, library="cutensor"):
    return next(row for row in GPU_ROWS if (row.library, row.dtypes[0]) == (library, dtype))


def run(request, executor, row):
    """A request's result by the plan of a row for GPUs, over memory of the host."""
    outputs = request.device.executor().outputs(request)
    for tensor in outputs.values():
        if tensor.size:
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    return request.result(outputs)
