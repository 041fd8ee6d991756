"""Plans with callbacks over a stand-in for cuFFT that calls them, compiled by g++, at the offsets of its layout.

Each case of each row, as one transform and as passes around one; operands at other addresses; what is kept and shared;
callbacks that do not compile; and the real compiler and linker.
"""

import ctypes
import importlib.util
import shutil
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import C64, C128, F32, HOST, Arch
from dispatch.libraries.cufft import callbacks
from dispatch.ops.fft import cufft_callback
from dispatch.ops.fft.cases import cases
from dispatch.table.select import select


def loaded(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded(Path(__file__).parents[1] / "cufft_stand_in.py")
kernels_on_cpu = loaded(Path(__file__).with_name("kernels_on_cpu.py"))
ROWS = [row for row in dp.TABLE.of("callback_dft") if row.min_arch != HOST]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    return stand_in.Kernels(tmp_path_factory.mktemp("callbacks"), kernels_on_cpu.BEFORE)


@pytest.fixture
def executor(monkeypatch, kernels):
    made = stand_in.executor_of(monkeypatch, kernels)
    monkeypatch.setattr(cufft_callback, "why_not", lambda: "")
    return made


def verified(request, executor, row, check):
    plan = row.call(request, executor, row)
    outputs = request.device.executor().outputs(request)
    for _ in range(2):  # the second over scratch memory that the first has left
        before = np.array(request.a)
        plan.enqueue(request.arguments(outputs))
        check.verify(request.result(outputs))
        if request.out is None or request.out.ptr != request.a.ptr:
            np.testing.assert_array_equal(np.asarray(request.a), before)
        check.renew(request.result(outputs))
    return plan


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_case_is_right_as_one_transform_and_as_passes_around_one(row, executor, each, monkeypatch):
    def look(case, rng):
        check = case.check(dp.device("host"), rng)
        verified(check.request, executor, row, check)

    each(cases(row), look)
    assert {"dispatch_load", "dispatch_store"} <= {*executor.library.called}
    executor.library.called.clear()
    monkeypatch.setattr(cufft_callback, "why_not", lambda: "it is too old")
    each(cases(row), look)
    assert not executor.library.called
