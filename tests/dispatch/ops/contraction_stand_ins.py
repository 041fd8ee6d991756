"""An executor without a GPU for plans of contractions, over a stand-in of cuTENSOR."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.core.row import accepts
from dispatch.ops.contraction import sequence
from dispatch.table.cutensor import GPU_ROWS


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cutensor_stand_in.py")
REQUIRED, WORKSPACE, Memory = stand_in.REQUIRED, stand_in.WORKSPACE, stand_in.Memory


@pytest.fixture
def dev():
    return dp.device("host")


@pytest.fixture
def executor(monkeypatch, dev):
    """An executor whose plans of steps are those of cuTENSOR's rows."""
    made = stand_in.executor_of(monkeypatch)

    def plan(asked):
        row = next(row for row in GPU_ROWS if row.op == asked.op and accepts(row, asked, asked.signature()))
        return row.call(asked, made, row)

    def allocate(nbytes, _):
        memory = Memory(nbytes)
        memory.device = dev
        return memory

    made.plan, made.device.layout, made.device.allocate = plan, dev.layout, allocate
    monkeypatch.setattr(sequence, "Storage", lambda *given: SimpleNamespace(device=dev, base=given[1], nbytes=given[2]))
    return made


def run(request, executor, row):
    """A request's result by the plan of a row for GPUs, over memory of the host."""
    outputs = request.device.executor().outputs(request)
    plan = row.call(request, executor, row)
    for tensor in outputs.values():
        if tensor.size:
            tensor.copy_from(np.full(tensor.shape, np.nan, tensor.dtype.numpy))
    plan.enqueue(request.arguments(outputs))
    return plan, request.result(outputs)


def row_of(op, dtype, compute="32F"):
    return next(
        row for row in GPU_ROWS if (row.op, row.dtypes[0], row.compute.name) == (op, dtype, f"COMPUTE_{compute}")
    )
