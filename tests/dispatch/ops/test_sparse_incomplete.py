"""ILU(0) and IC(0): what SciPy and NumPy say of the factors, what is kept, pivots that are 0, and what is refused."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import Arch
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")
spec = importlib.util.spec_from_file_location(
    "further_stand_in", Path(__file__).parents[1] / "cusparse_further_stand_in.py"
)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

S = dp.sparse


def poisson(n):
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(n, n))
    return (sp.kron(line, sp.eye_array(n)) + sp.kron(sp.eye_array(n), line)).tocsr()


def parts_of(factors):
    """L and U of the one matrix that holds both."""
    dense = factors.matrix.todense().numpy()
    return np.tril(dense, -1) + np.eye(len(dense)), np.triu(dense)


def test_the_product_of_the_factors_is_the_matrix_where_that_has_elements(rng):
    a = poisson(7) + sp.diags_array(rng.random(49))
    convection = (a + sp.diags_array([0.3, -0.3], offsets=[-1, 1], shape=(49, 49)).multiply(a != 0)).tocsr()
    low, high = parts_of(S.ilu0(convection))
    there = convection.toarray() != 0
    np.testing.assert_allclose((low @ high)[there], convection.toarray()[there], atol=1e-12)
    assert np.abs((low @ high)[~there]).max() > 1e-3, "there is fill, which is left out"
    low = np.tril(S.ic0(a.tocsr()).matrix.todense().numpy())
    there = a.toarray() != 0
    np.testing.assert_allclose((low @ low.T)[there], a.toarray()[there], atol=1e-12)


def test_without_fill_the_factors_are_those_of_the_whole_matrix(rng):
    dense = np.diag(rng.random(9) + 3) + np.diag(rng.standard_normal(8), 1) + np.diag(rng.standard_normal(8), -1)
    b, several = rng.standard_normal(9), rng.standard_normal((9, 3))
    dev = dp.device("host")
    factors = S.ilu0(sp.csr_array(dense))
    np.testing.assert_allclose(factors.solve(dev.array(b)).numpy(), np.linalg.solve(dense, b))
    np.testing.assert_allclose(factors.solve(dev.array(several)).numpy(), np.linalg.solve(dense, several))
    factors.refactorize(dev.array(2 * sp.csr_array(dense).data))
    np.testing.assert_allclose(factors.solve(dev.array(b)).numpy(), np.linalg.solve(2 * dense, b))
    hermitian = dense @ dense.T * np.tri(9, k=1) * np.tri(9, k=1).T + 9 * np.eye(9)
    hermitian = hermitian + 1j * (np.diag(np.ones(8), 1) - np.diag(np.ones(8), -1))
    x = S.ic0(sp.csr_array(hermitian)).solve(dev.array(b.astype(complex))).numpy()
    np.testing.assert_allclose(x, np.linalg.solve(hermitian, b))


@pytest.mark.parametrize("make", [S.ilu0, S.ic0])
def test_a_pivot_that_is_0_or_has_no_place_is_told_by_its_row(make):
    what = "0" if make is S.ilu0 else "not above 0"
    dense = np.array([[4.0, 2, 0], [2, 1, 0], [0, 0, 3]])
    with pytest.raises(LinAlgError, match=f"the pivot of row 1 is {what}, or"):
        make(sp.csr_array(dense))
    missing = sp.csr_array(np.array([[2.0, 1, 0], [1, 2, 1], [0, 1, 0]]))
    with pytest.raises(LinAlgError, match=f"the pivot of row 2 is {what}, or is not stored"):
        make(missing)
    request = (dp.Ilu0Request if make is S.ilu0 else dp.Ic0Request)(*S.sparse_tensor(missing))
    values, info = dp.run(request)
    assert info.item() == 3
    assert np.isnan(values.numpy()).all()
    assert np.isnan(make(missing, check=False).matrix.values.numpy()).all()


def test_what_fails_leaves_the_factors_of_before(rng):
    dev, a = dp.device("host"), poisson(4)
    factors, b = S.ilu0(a), dev.array(rng.standard_normal(16))
    before = factors.solve(b).numpy()
    with pytest.raises(LinAlgError):
        factors.refactorize(np.zeros(a.nnz))
    with pytest.raises(BadRequest, match=rf"values: got .*; expected f64\[{a.nnz}\]"):
        factors.refactorize(np.ones(a.nnz + 1))
    np.testing.assert_array_equal(factors.solve(b).numpy(), before)


@pytest.mark.parametrize("indices", ["i4", "i8"])
@pytest.mark.parametrize("make", [S.ilu0, S.ic0])
def test_other_values_of_a_matrix_by_columns_are_at_its_own_places(make, indices, rng):
    dev, b = dp.device("host"), rng.standard_normal(25)
    weights = sp.diags_array(1 + rng.random(25))
    other = weights @ poisson(5) @ (weights if make is S.ic0 else sp.eye_array(25))
    expected = make(sp.csr_array(other)).matrix.values.numpy()
    first, second = sp.csc_array(poisson(5)), sp.csc_array(other)
    first.indices, first.indptr = first.indices.astype(indices), first.indptr.astype(indices)
    a, turned = S.sparse_tensor(first), S.sparse_tensor(sp.csr_array(poisson(5).T)).T
    for given in (first, a, turned):
        np.testing.assert_array_equal(make(given).refactorize(second.data).matrix.values.numpy(), expected)
    given = a if indices == "i4" else turned  # those of i64 become others, which are not at the places of A
    factors, method = make(given), S.cg if make is S.ic0 else S.bicgstab
    for matrix, whole in ((given, first), (given.with_values(second.data), second)):
        x = method(matrix, dev.array(b), rtol=1e-10, M=factors.refactorize(matrix.values), check=True)
        np.testing.assert_allclose(whole @ np.asarray(x), b, atol=1e-8)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("kind", [dp.Ilu0Request, dp.Ic0Request])
def test_an_analysis_is_kept_where_the_pattern_is_promised_and_values_may_change(kind, fixed, monkeypatch):
    executor = stand_in.executor_of(monkeypatch)
    a = S.sparse_tensor(poisson(5), device="host")
    request = kind(*(a.fixed() if fixed else a))
    row = select(request, Arch(90))
    plan = row.call(request, executor, row)
    assert not plan.capture_safe
    for factor in (1.0, 4.0, 0.5):
        a.values.copy_from(poisson(5).data * factor)
        outputs = request.device.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        expected = dp.run(request)[0].numpy()
        lower = np.array([column <= row for row in range(25) for column in poisson(5)[[row]].indices])
        kept = lower if kind is dp.Ic0Request else slice(None)
        np.testing.assert_allclose(outputs["out"].numpy()[kept], expected[kept])
        assert outputs["info"].item() == 0
    analyses = sum(name.endswith("_analysis") for name in executor.library.called)
    assert analyses == (1 if fixed else 3)
    elsewhere = request.replace(columns=request.device.array(a.columns.numpy()))
    outputs = request.device.executor().outputs(elsewhere)
    plan.enqueue(elsewhere.arguments(outputs))
    assert sum(name.endswith("_analysis") for name in executor.library.called) == analyses + 1


def test_a_pivot_of_0_makes_nan_on_the_gpu_too_and_the_next_run_is_right(monkeypatch):
    executor = stand_in.executor_of(monkeypatch)
    a = S.sparse_tensor(poisson(3), device="host").fixed()
    request = dp.Ilu0Request(*a)
    row = select(request, Arch(90))
    plan = row.call(request, executor, row)
    for values, info in ((0 * poisson(3).data, 1), (poisson(3).data, 0)):
        a.values.copy_from(values)
        outputs = request.device.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        assert outputs["info"].item() == info
        assert np.isnan(outputs["out"].numpy()).all() == bool(info)


def test_what_is_no_square_matrix_in_csr_of_narrow_indices_is_refused():
    a = poisson(3)
    with pytest.raises(BadRequest, match=r"form\.format: got CSC; expected CSR"):
        dp.ilu0(*S.sparse_tensor(a.tocsc()))
    with pytest.raises(BadRequest, match=r"form\.shape: got \(9, 8\); expected a square matrix"):
        dp.ic0(*S.sparse_tensor(a[:, :8].tocsr()))
    a.indices, a.indptr = a.indices.astype("i8"), a.indptr.astype("i8")
    with pytest.raises(NoRow, match="needs rows of i32, has i64"):
        dp.ilu0(*S.sparse_tensor(a))
