"""The plans that call cuSOLVER, over a stand-in for it: every case of every row, so that layouts are right anywhere."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops import FAMILIES
from dispatch.ops.linalg.cases import cases


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded("cusolver_stand_in")
spectral = loaded("cusolver_spectral_stand_in")

ROWS = [row for row in dp.TABLE if row.op in FAMILIES["linalg"][1] and row.min_arch != HOST]


@pytest.fixture
def executor(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr("dispatch.ops.linalg.cusolver_jacobi.Settings", stand_in.Settings)
    made = stand_in.executor_of(monkeypatch)
    spectral.install(monkeypatch, stand_in)
    return made


@pytest.mark.parametrize(
    "every", [pytest.param(4, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_lays_its_operands_as_the_routines_take_them(row, every, executor, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:  # each form in one of the dtypes at least
        check = case.check(dp.device("host"), rng)
        request = check.request
        plan = row.call(request, executor, row)
        for _ in range(2):  # the second over scratch memory that the first has left
            outputs = request.device.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            check.renew(request.result(outputs))


FAILING = [row for row in ROWS if row.op in ("eigh", "generalized_eigh", "eig", "svd", "randomized_svd")]


@pytest.mark.parametrize("row", FAILING, ids=lambda row: row.name)
def test_a_status_of_the_routine_makes_nan_of_all_results(row, executor, monkeypatch, rng):
    put = stand_in.put_info
    monkeypatch.setattr(stand_in, "put_info", lambda pointer, _, number=0: put(pointer, 1, number))
    for case in cases(row)[:: len(cases(row)) // 4]:
        request = case.check(dp.device("host"), rng).request
        if not request.a.size:
            continue
        outputs = request.device.executor().outputs(request)
        row.call(request, executor, row).enqueue(request.arguments(outputs))
        found = dict(zip(request.outputs(), request.result(outputs), strict=True))
        assert found.pop("info").numpy().all()
        found.pop("count", None)
        assert all(np.isnan(tensor.numpy()).all() for tensor in found.values())
