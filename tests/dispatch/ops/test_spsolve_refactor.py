"""Direct solves by cuSOLVER's refactorization: plans over a stand-in, what is kept, and what the host finds out."""

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import NoRow
from dispatch.keys import Arch
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.cusolver_refactor import order_of
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")


def module_at(name):
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cusolver, cusparse = map(module_at, ("cusolver_rf_stand_in", "cusparse_stand_in"))
DEV = None
ROW = next(row for row in dp.TABLE.of("spsolve") if row.library == "cusolverRf")
N = 30


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    yield cusolver.executor_of(monkeypatch, cusparse.Copy)
    gc.collect()


def drawn(rng, n=N):
    """A matrix whose rows have to be exchanged, and its pattern."""
    mask = (rng.random((n, n)) < 3 / n) | np.eye(n, dtype=bool)[rng.permutation(n)]
    return np.where(mask, rng.standard_normal((n, n)) + np.where(mask, 3, 0) * (rng.random((n, n)) < 0.2), 0), mask


def enqueued(plan, request):
    outputs = request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return [found.numpy() for found in request.result(outputs)]


def request_of(dense, mask, b, **choices):
    columns = np.nonzero(mask)[1]
    offsets = np.concatenate([[0], np.cumsum(mask.sum(axis=1))])
    form = dp.SparseForm("csr", mask.shape, pattern=77)
    parts = dense[mask], offsets.astype("i4"), columns.astype("i4")
    return dp.SpsolveRequest(*map(DEV.array, parts), form, DEV.array(b), stamp=choices.pop("stamp", 1), **choices)


def test_the_fill_has_room_for_any_values(rng):
    for _ in range(60):
        n = int(rng.integers(1, 40))
        dense, mask = drawn(rng, n)
        rows, columns = np.nonzero(mask)
        found = order_of(sp.csr_array((dense[mask], (rows, columns)), (n, n)))
        if found is None:
            continue
        low, high, p, q = found
        shapes = [sp.csr_array((np.ones(len(one.values)), one.columns, one.offsets), (n, n)) for one in (low, high)]
        fill = (shapes[0] + shapes[1]).toarray() != 0
        left = mask[p][:, q].copy()
        for i in range(n):
            left[i + 1 :, i + 1 :] |= np.outer(left[i + 1 :, i], left[i, i + 1 :])
        assert not (left & ~fill).any()


def test_the_host_orders_once_and_the_gpu_factorizes_what_follows(executor, rng):
    dense, mask = drawn(rng)
    plan = None
    library = executor.library
    for stamp, factor, sides in ((1, 1.0, 0), (1, 1.0, 0), (2, 0.5, 0), (3, 3.0, 0)):
        values = dense * (factor + 0.1 * rng.random((N, N)) * (stamp > 1))
        b = rng.standard_normal((N, sides) if sides else N)
        request = request_of(values, mask, b, stamp=stamp)
        if plan is None:
            held, plan = request, ROW.call(request, executor, ROW)
        held.values.copy_from(values[mask])
        request = request.replace(values=held.values, rows=held.rows, columns=held.columns)
        x, info = enqueued(plan, request)
        assert info == 0
        np.testing.assert_allclose(values @ x, b, atol=1e-8)
    assert library.called.count("SetupHost") == library.called.count("Analyze") == 1
    assert library.called.count("Refactor") == 3, "factors are kept under their stamp"
    assert {5, None} <= set(executor.waited), "on both streams"
    plan = None
    gc.collect()
    assert not library.alive


@pytest.mark.parametrize("by_rows", [False, True])
def test_several_right_sides_in_any_order(by_rows, executor, rng):
    dense, mask = drawn(rng)
    b = rng.standard_normal((N, 3))
    right = DEV.array(b) if by_rows else DEV.array(b.T.copy()).T
    request = request_of(dense, mask, b).replace(b=right)
    x, info = enqueued(ROW.call(request, executor, ROW), request)
    assert info == 0
    np.testing.assert_allclose(dense @ x, b, atol=1e-8)
    assert executor.library.called.count("Solve") == 3


def test_values_whose_pivots_vanish_in_that_order_are_ordered_anew_and_singular_ones_told(executor):
    mask = np.ones((2, 2), bool)
    first, turned = np.array([[4.0, 1.0], [1.0, 4.0]]), np.array([[0.0, 2.0], [3.0, 0.0]])
    request = request_of(first, mask, np.ones(2))
    plan = ROW.call(request, executor, ROW)
    enqueued(plan, request)
    for stamp, matrix, status in (
        (2, turned, 0),
        (3, np.ones((2, 2)) * 0, -1),
        (4, first, 0),
        (5, np.ones((2, 2)), -1),
    ):
        request.values.copy_from(matrix.ravel())
        x, info = enqueued(plan, request.replace(stamp=stamp))
        assert info == status
        if not status:
            np.testing.assert_allclose(matrix @ x, np.ones(2))
    assert executor.library.called.count("SetupHost") >= 3


def test_the_row_passes_the_cases_that_it_takes(executor, rng):
    taken = 0
    for case in cases(ROW):
        check = case.check(DEV, rng)
        if any(rule(check.request) for rule in ROW.rules):
            continue
        plan = ROW.call(check.request, executor, ROW)
        for _ in range(2):
            check.renew()
            outputs = DEV.executor().outputs(check.request)
            plan.enqueue(check.request.arguments(outputs))
            check.verify(check.request.result(outputs))
        taken += 1
    assert taken == 2


class Without(dict):
    """The versions of the libraries where one is not installed."""

    def get(self, name, default=None):
        if name == "cudss":
            raise LibraryNotFound("cudss", text="libcudss.so.1 was not found", hint="pip install nvidia-cudss")
        return super().get(name, default)


def test_it_is_asked_for_factors_that_are_kept_where_cudss_is_not_there(rng):
    dense, mask = drawn(rng)
    request = request_of(dense, mask, np.ones(N))
    assert select(request, Arch(90)).library == "cudss"
    assert select(request, Arch(90), Without()).library == "cusolverRf"
    assert select(request.replace(stamp=None), Arch(90), Without()).library == "cusolverSp"
    assert select(request.replace(assume_a="pos"), Arch(90), Without()).library == "cusolverSp"
    for changed, words in (
        ({"stamp": None}, "needs a stamp and a fixed pattern, as splu passes them"),
        ({"assume_a": "pos"}, "needs assume_a other than pos"),
        ({"form": request.form._replace(base=1)}, "needs base 0, has 1"),
        ({"memory": "hybrid"}, "needs memory device, has hybrid"),
    ):
        with pytest.raises(NoRow, match=words):
            select(request.replace(library="cusolverRf", **changed), Arch(90))
