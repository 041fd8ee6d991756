"""In which order of memory plans of linear algebra solve and factorize, over the stand-ins: those that are fast."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.table.select import candidates, select


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded("cusolver_stand_in")
products = loaded("cublas_linalg_stand_in")


@pytest.fixture
def executor(monkeypatch):
    pytest.importorskip("scipy")
    made = stand_in.executor_of(monkeypatch)
    made.batched = products.install(monkeypatch, stand_in)
    return made


def noted(monkeypatch):
    """Names and arguments of cuSOLVER's calls, and the copies by a kernel, as they come."""
    called, copied = [], []
    unchecked, enqueue = stand_in.Routine.unchecked, stand_in.Copy.enqueue

    def call(self, *given):
        called.append((self.name, given))
        return unchecked(self, *given)

    def copy(self, addresses):
        copied.append(self.given)
        return enqueue(self, addresses)

    monkeypatch.setattr(stand_in.Routine, "unchecked", call)
    monkeypatch.setattr(stand_in.Copy, "enqueue", copy)
    return called, copied


def run(request, executor, row=None):
    row = row or next(row for row in candidates(request, Arch(90)) if row.library != "own")
    plan, outputs = row.call(request, executor, row), request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


def laid(values, order):
    """A tensor on the host, in rows, in columns, or with gaps between the elements of both."""
    dev = dp.device("host")
    if order == "strided":
        wide = dev.array(np.repeat(np.repeat(values, 2, -1), 2, -2))
        return wide[..., ::2, ::2]
    return dev.array(values.mT.copy()).mT if order == "columns" else dev.array(values)


def positive(rng, dtype, *batch):
    a = rng.standard_normal((*batch, 6, 6)) + 1j * rng.standard_normal((*batch, 6, 6))
    a = a @ a.conj().mT + 6 * np.eye(6)
    return a if dtype == "c128" else a.real.copy()


ORDERS = ("rows", "columns", "strided")
FACTORIZED = {"Xpotrf": 2, "DpotrfBatched": 1, "ZpotrfBatched": 1, "Dpotri": 1, "Zpotri": 1}  # where uplo stands


@pytest.mark.parametrize("dtype", ["f64", "c128"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "many"])
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_lower_triangle_by_columns_is_factorized_wherever_a_copy_is_made(
    order, lower, batch, dtype, executor, monkeypatch, rng
):
    values = positive(rng, dtype, *batch)
    factor = np.linalg.cholesky(values) if lower else np.linalg.cholesky(values).conj().mT
    half = np.where(np.tri(6, dtype=bool) if lower else np.tri(6, dtype=bool).T, values, np.nan)
    lucky, called, copied = "columns" if lower else "rows", *noted(monkeypatch)
    for out in (None, *ORDERS, "in place"):
        a = laid(half, order)
        given = None if out is None else a if out == "in place" else laid(np.full_like(half, np.nan), out)
        found, info = run(dp.CholeskyRequest(a, lower=lower, out=given), executor)
        assert not info.numpy().any()
        if out is None:
            assert found.layout.strides[-2:] == ((1, 6) if lower else (6, 1))
        np.testing.assert_allclose(found.numpy(), factor, atol=1e-12)
        ((name, arguments),) = called
        lies = lucky if out is None else order if out == "in place" else out
        is_turned = out == "in place" and not batch and lies != lucky and lies != "strided"
        assert arguments[FACTORIZED[name]] == int(is_turned)
        assert len(copied) == 1 + (bool(batch) or (lies != lucky and not is_turned))
        called.clear(), copied.clear()
    b = rng.standard_normal((*batch, 6, 2)).astype(values.dtype)
    for of in (
        dp.SolveRequest(laid(half, order), dp.device("host").array(b), assume_a="pos", lower=lower),
        dp.InvRequest(laid(half, order), assume_a="pos", lower=lower),
    ):
        found, info = run(of, executor)
        assert not info.numpy().any()
        exact = np.linalg.inv(values)
        np.testing.assert_allclose(found.numpy(), exact @ b if of.op == "solve" else exact, atol=1e-12)
    assert {arguments[FACTORIZED[name]] for name, arguments in called if name in FACTORIZED} == {0}
    assert len(copied) == 4


@pytest.mark.parametrize("dtype", ["f64", "c128"])
@pytest.mark.parametrize("batch", [(), (3,)], ids=["one", "in turn"])
@pytest.mark.parametrize("order", ORDERS)
def test_factors_of_lu_are_solved_with_by_two_triangles_from_the_left(order, batch, dtype, executor, monkeypatch, rng):
    scipy = pytest.importorskip("scipy.linalg")
    values = rng.standard_normal((*batch, 6, 6)) + (1j * rng.standard_normal((*batch, 6, 6)) if dtype == "c128" else 0)
    b = rng.standard_normal((*batch, 6, 4)).astype(values.dtype)
    factors = [scipy.lu_factor(one) for one in values.reshape(-1, 6, 6)]
    lu, pivots = (np.reshape(parts, (*batch, *parts[0].shape)) for parts in zip(*factors, strict=True))
    pivots = dp.device("host").array(pivots.astype(np.int64) + 1)
    called, copied = noted(monkeypatch)
    function = f"cublas{'Z' if dtype == 'c128' else 'D'}trsm_v2"
    (row,) = (row for row in dp.TABLE if (row.op, row.function) == ("lu_solve", function))
    for trans, op in enumerate((values, values.mT, values.conj().mT)):
        for out in (None, *ORDERS, "in place"):
            right = laid(b, order)
            given = None if out is None else right if out == "in place" else laid(np.full_like(b, np.nan), out)
            request = dp.LuSolveRequest(laid(lu, "columns"), pivots, right, trans=trans, out=given)
            np.testing.assert_allclose(op @ run(request, executor, row).numpy(), b, atol=1e-12)
            if out != "in place":
                np.testing.assert_array_equal(right.numpy(), b)
            assert executor.batched.called == [function] * 2 * max((1, *batch))
            is_apart = trans == 0 and out != "in place" and out != order
            lies = "columns" if out is None else order if out == "in place" else out
            assert len(copied) == (not (lies == "columns" and (out is None or is_apart)) if trans == 0 else 1)
            executor.batched.called.clear(), copied.clear()
    assert not called


@pytest.mark.parametrize("op", ["solve", "inv"])
def test_a_singular_matrix_gives_nan_and_its_status_where_triangles_are_solved(op, executor, rng):
    a = rng.standard_normal((6, 6))
    a[:, 3] = 0
    a = dp.device("host").array(a)
    x, info = run(dp.SolveRequest(a, a) if op == "solve" else dp.InvRequest(a), executor)
    assert info.numpy() == 4
    assert np.isnan(x.numpy()).all()


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("n", [64, 65])
def test_a_factor_that_a_batched_routine_overwrites_is_copied(n, lower, order, executor, rng):
    """All of it, also the triangle that is not read."""
    dev = dp.device("host")
    full = rng.standard_normal((3, n, n)) + n * np.eye(n)
    factor = np.tril(full) if lower else np.triu(full)
    b = rng.standard_normal((3, n, 1))
    c = dev.array(full if order == "C" else full.mT.copy())
    request = dp.ChoSolveRequest(c if order == "C" else c.mT, dev.array(b), lower=lower, library="cusolverDn")
    row = select(request, Arch(90))
    outputs = dev.executor().outputs(request)
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    np.testing.assert_array_equal(request.c.numpy(), full)
    a = factor @ factor.mT if lower else factor.mT @ factor
    np.testing.assert_allclose(a @ request.result(outputs).numpy(), b, rtol=1e-8, atol=1e-8)
