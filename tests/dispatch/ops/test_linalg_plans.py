"""The plans that call cuSOLVER, over a stand-in for it: every case of every row, so that layouts are right anywhere."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST, Arch
from dispatch.ops import FAMILIES
from dispatch.ops.linalg.cases import cases
from dispatch.table.select import select


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded("cusolver_stand_in")
spectral = loaded("cusolver_spectral_stand_in")
products = loaded("cublas_linalg_stand_in")

ROWS = [row for row in dp.TABLE if row.op in FAMILIES["linalg"][1] and row.min_arch != HOST]


@pytest.fixture
def executor(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr("dispatch.ops.linalg.cusolver_jacobi.Settings", stand_in.Settings)
    made = stand_in.executor_of(monkeypatch)
    made.batched = products.install(monkeypatch, stand_in)
    spectral.install(monkeypatch, stand_in)
    return made


@pytest.mark.parametrize(
    "every", [pytest.param(64, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_lays_its_operands_as_the_routines_take_them(row, every, executor, rng):
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(dp.device("host"), rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            continue
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


def test_ten_thousand_systems_are_one_call_of_each_routine(executor, rng):
    dev = dp.device("host")
    a = dev.array(rng.standard_normal((10_000, 4, 4)) + 4 * np.eye(4), "f32")
    request = dp.SolveRequest(a, dev.array(rng.standard_normal((10_000, 4, 1)), "f32"))
    row = select(request, Arch(90))
    plan, outputs = row.call(request, executor, row), dev.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    assert executor.batched.called == ["cublasSgetrfBatched", "cublasSgetrsBatched"]
    x, info = request.result(outputs)
    assert not info.numpy().any()
    np.testing.assert_allclose(np.asarray(a) @ x.numpy(), np.asarray(request.b), atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "library"),
    [((10, 32, 32), "cublas"), ((10, 129, 129), "cusolverDn"), ((1, 32, 32), "cusolverDn"), ((32, 32), "cusolverDn")],
)
def test_many_small_matrices_go_to_cublas_and_others_to_cusolver(shape, library):
    a = dp.device("host").zeros(shape)
    for request in (dp.LuFactorRequest(a), dp.SolveRequest(a, a), dp.QrRequest(a), dp.ChoSolveRequest(a, a)):
        assert select(request, Arch(90)).library == library
    oblong = dp.device("host").zeros((4, 6, 5))
    assert select(dp.LuFactorRequest(oblong), Arch(90)).library == "cusolverDn"
    assert select(dp.QrRequest(oblong), Arch(90)).library == "cublas"
