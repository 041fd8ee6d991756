"""In which order of memory plans of linear algebra solve and factorize, over the stand-ins: those that are fast."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import Arch
from dispatch.table.select import select


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


def run(request, executor):
    row = select(request, Arch(90))
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
