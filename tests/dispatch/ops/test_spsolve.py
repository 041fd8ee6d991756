"""Direct solves: plans over a stand-in of cuDSS, what is kept, what is refused, and objects like SciPy's SuperLU."""

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from cudabind.errors import LibraryNotFound
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import Arch
from dispatch.ops.sparse.cases_direct import direct_cases
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")


def module_at(name):
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


blocks_on_cpu = module_at("ops/blocks_on_cpu")
cudss, cusparse, cusolver = map(module_at, ("cudss_stand_in", "cusparse_stand_in", "cusolver_sp_stand_in"))
ROWS = [row for row in dp.TABLE if row.op == "spsolve" and row.library == "cudss"]
ANALYSIS, FACTORIZATION, REFACTORIZATION, SOLVE = 3, 4, 8, 1008


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return blocks_on_cpu.InBlocks(tmp_path_factory.mktemp("refined"))


@pytest.fixture
def executor(monkeypatch, on_cpu):
    cudss.refine_on_cpu(monkeypatch, on_cpu)
    yield cudss.executor_of(monkeypatch, cusparse.Copy)
    gc.collect()  # what a plan holds is given back to the stand-in


def system(rng, n=12):
    dense = rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.4) + np.eye(n) * 5
    return dense, dp.sparse.sparse_tensor(sp.csr_array(dense))


def made(request, executor):
    row = select(request, Arch(90))
    return row.call(request, executor, row)


class WithoutCudss(dict):
    """The versions of the libraries where cuDSS is not installed."""

    def get(self, name, default=None):
        if name == "cudss":
            raise LibraryNotFound("cudss", text="libcudss.so.0 was not found", hint="pip install nvidia-cudss")
        return super().get(name, default)


def test_without_cudss_the_next_row_is_taken_and_what_it_refuses_says_what_to_install(rng):
    _, a = system(rng)
    request, versions = dp.SpsolveRequest(*a, dp.device("host").array(rng.standard_normal(12))), WithoutCudss()
    assert select(request, Arch(90), versions).library == "cusolverSp"
    found = dp.explain(request, Arch(90), versions)
    assert found.row.library == "cusolverSp"
    missing = "needs cudss, which is not installed: pip install nvidia-cudss"
    refused = {name: [str(reason) for reason in why] for name, why in found.refusals}
    assert refused["spsolve f64→f64 sm_75 cudss"] == [missing]
    for other in (request.replace(library="cudss"), request.replace(assume_a="sym", uplo="l")):
        with pytest.raises(NoRow, match=missing):
            select(other, Arch(90), versions)
        assert missing in str(dp.explain(other, Arch(90), versions))
    with pytest.raises(NoRow) as caught:
        select(request.replace(library="cudss"), Arch(90), versions)
    assert "Nearest that works: library=None (now cudss)" in str(caught.value)


def enqueued(plan, request):
    outputs = request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, executor, rng):
    for case in direct_cases(row):
        check = case.check(dp.device("host"), rng)
        plan = row.call(check.request, executor, row)
        assert not plan.capture_safe
        for _ in range(2):
            check.renew()
            check.verify(enqueued(plan, check.request))
    plan = None
    gc.collect()
    assert executor.library.alive == {1: "handle"}, "all is given back"


def test_without_a_promise_each_call_analyses(executor, rng):
    dense, a = system(rng)
    b = rng.standard_normal(12)
    request = dp.SpsolveRequest(*a, dp.device("host").array(b))
    plan = made(request, executor)
    for _ in range(2):
        np.testing.assert_allclose(enqueued(plan, request)[0].numpy(), np.linalg.solve(dense, b))
    assert executor.library.phases == [ANALYSIS, FACTORIZATION, SOLVE] * 2


def test_a_fixed_pattern_is_analysed_once_and_values_may_change(executor, rng):
    dense, a = system(rng)
    a, b = a.fixed(), rng.standard_normal(12)
    request = dp.SpsolveRequest(*a, dp.device("host").array(b))
    plan = made(request, executor)
    enqueued(plan, request)
    a.values.copy_from(a.values.numpy() * 2)
    np.testing.assert_allclose(enqueued(plan, request)[0].numpy(), np.linalg.solve(2 * dense, b))
    assert executor.library.phases == [ANALYSIS, FACTORIZATION, SOLVE, REFACTORIZATION, SOLVE]
    elsewhere = request.replace(columns=dp.device("host").array(a.columns.numpy()))
    np.testing.assert_allclose(enqueued(plan, elsewhere)[0].numpy(), np.linalg.solve(2 * dense, b))
    assert executor.library.phases[5:] == [ANALYSIS, FACTORIZATION, SOLVE], "indices at another address"


def test_a_stamp_keeps_the_factors_until_there_is_another(executor, rng):
    dense, a = system(rng)
    a, dev = a.fixed(), dp.device("host")
    plan = made(dp.SpsolveRequest(*a, dev.array(np.ones(12)), stamp=1), executor)
    for stamp in (1, 1, 2, 2):
        b = rng.standard_normal(12)
        request = dp.SpsolveRequest(*a, dev.array(b), stamp=stamp)
        np.testing.assert_allclose(enqueued(plan, request)[0].numpy(), np.linalg.solve(dense, b))
    phases = [ANALYSIS, FACTORIZATION, SOLVE, SOLVE, REFACTORIZATION, SOLVE, SOLVE]
    assert executor.library.phases == phases
    keys = {dp.SpsolveRequest(*a, dev.array(b), stamp=stamp).key() for stamp in (1, 2)}
    assert len(keys) == 1, "a stamp makes no plan of its own"


def test_what_is_not_positive_definite_is_told_and_replaced_pivots_are_counted(executor):
    a = dp.sparse.sparse_tensor(sp.csr_array(np.diag([1.0, -1.0, 2.0]))).fixed()
    b = dp.device("host").array(np.ones(3))
    request = dp.SpsolveRequest(*a, b, assume_a="pos")
    plan = made(request, executor)
    assert enqueued(plan, request)[1].item() > 0
    assert enqueued(plan, request)[1].item() > 0
    assert REFACTORIZATION not in executor.library.phases, "one that has failed is not repeated, but made anew"
    executor.library.replaced = 2
    request = dp.SpsolveRequest(*a, b)
    assert enqueued(made(request, executor), request)[1].item() == -2


def test_factors_go_with_their_executor(executor, rng):
    _, a = system(rng)
    request = dp.SpsolveRequest(*a, dp.device("host").array(np.ones(12)))
    plan = made(request, executor)
    enqueued(plan, request)
    for close in executor.at_close:
        close()
    assert executor.library.alive == {1: "handle"}
    for close in executor.at_close:
        close()  # once more does nothing


# -- cuSOLVER ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def sequential(monkeypatch):
    yield cusolver.executor_of(monkeypatch, cusparse.Copy)
    gc.collect()


@pytest.mark.parametrize("row", [row for row in dp.TABLE.of("spsolve") if row.library == "cusolverSp"], ids=str)
def test_cusolver_solves_column_by_column(row, sequential, rng):
    tried = set()
    for case in direct_cases(row):
        check = case.check(dp.device("host"), rng)
        if any(rule(check.request) for rule in row.rules):
            continue
        plan = row.call(check.request, sequential, row)
        for _ in range(2):
            check.renew()
            sequential.library.called.clear()
            check.verify(enqueued(plan, check.request))
            sides = check.request.b.shape[1] if check.request.b.ndim == 2 else 1
            assert len(sequential.library.called) == sides
        tried |= set(sequential.library.called)
    assert {name[-4:] for name in tried} == {"svqr", "chol"}
    plan = None
    gc.collect()
    assert not sequential.library.alive, "descriptors are given back"


def test_cusolver_tells_what_it_cannot_factorize(sequential):
    row = next(row for row in dp.TABLE.of("spsolve") if row.library == "cusolverSp" and row.dtypes[0].name == "f64")
    b = dp.device("host").array(np.ones(3))
    for diagonal, kind, status in (
        ([1.0, 2.0, -1.0], "pos", 3),
        ([1.0, 0.0, 1.0], "gen", -1),
        ([1.0, -2.0, 1.0], "sym", 0),
    ):
        matrix = sp.csr_array((np.array(diagonal), np.arange(3, dtype="i4"), np.arange(4, dtype="i4")), (3, 3))
        request = dp.SpsolveRequest(*dp.sparse.sparse_tensor(matrix), b, assume_a=kind)
        assert enqueued(row.call(request, sequential, row), request)[1].item() == status


def test_cudss_is_asked_before_cusolver_and_either_can_be_named(rng):
    _, a = system(rng)
    b = dp.device("host").array(np.ones(12))
    assert select(dp.SpsolveRequest(*a, b), Arch(90)).library == "cudss"
    assert select(dp.SpsolveRequest(*a, b, library="cusolverSp"), Arch(90)).library == "cusolverSp"
    with pytest.raises(NoRow, match="both triangles"):
        select(dp.SpsolveRequest(*a, b, library="cusolverSp", assume_a="sym", uplo="lower"), Arch(90))


# -- requests and the host --------------------------------------------------------------------------------------------
def test_bad_requests_are_refused_by_name(rng):
    dev = dp.device("host")
    _, a = system(rng)
    for fields, words in (
        ({"b": np.ones(11)}, "b: "),
        ({"b": np.ones((12, 0))}, r"b: got f64\[12, 0\]; expected f64\[12\] or \[12, 1 or more\], because A is"),
        ({"uplo": "lower"}, "uplo: "),
        ({"stamp": -1}, "stamp"),
        ({"assume_a": "band"}, "assume_a"),
    ):
        given = {"b": np.ones(12), **fields}
        with pytest.raises(BadRequest, match=words):
            dp.spsolve(*a, dev.array(given.pop("b")), **given)
    with pytest.raises(NoRow, match="needs CSR, has COO"):
        dp.spsolve(*dp.sparse.tocoo(a), dev.array(np.ones(12)))


def test_spsolve_and_splu_in_scipys_words(rng):
    dev = dp.device("host")
    dense, a = system(rng)
    b, several = rng.standard_normal(12), rng.standard_normal((12, 3))
    np.testing.assert_allclose(dp.sparse.spsolve(a, dev.array(b)).numpy(), linalg.spsolve(sp.csc_array(dense), b))
    factors = dp.sparse.splu(a)
    assert factors.shape == (12, 12)
    np.testing.assert_allclose(dense @ factors.solve(dev.array(b)).numpy(), b)
    np.testing.assert_allclose(dense @ factors.solve(dev.array(several)).numpy(), several)
    factors.refactorize(dev.array(a.values.numpy() * 4))
    np.testing.assert_allclose(4 * dense @ factors.solve(dev.array(b)).numpy(), b)
    np.testing.assert_allclose(dense @ dp.sparse.factorized(a)(dev.array(b)).numpy(), b)
    assert "12" in repr(factors)


@pytest.mark.parametrize("indices", ["i4", "i8"])
def test_other_elements_of_a_matrix_by_columns_are_at_its_own_places(indices, rng):
    dev = dp.device("host")
    dense, _ = system(rng)
    b, other = dev.array(rng.standard_normal(12)), np.where(dense != 0, rng.standard_normal((12, 12)), 0)
    other += 4 * np.eye(12)
    by_columns = {name: sp.csc_array(matrix) for name, matrix in (("first", dense), ("other", other))}
    first = by_columns["first"]
    first.indices, first.indptr = first.indices.astype(indices), first.indptr.astype(indices)
    turned = dp.sparse.sparse_tensor(sp.csr_array(dense.T), device=dev).T
    for a in (first, dp.sparse.sparse_tensor(first, device=dev), turned):
        factors = dp.sparse.splu(a)
        np.testing.assert_allclose(dense @ factors.solve(b).numpy(), b.numpy())
        factors.refactorize(dev.array(by_columns["other"].data))
        np.testing.assert_allclose(other @ factors.solve(b).numpy(), b.numpy())


def test_other_elements_that_do_not_fit_are_refused_at_once_and_the_factors_stay(rng):
    dev = dp.device("host")
    dense, a = system(rng)
    b, factors = dev.array(rng.standard_normal(12)), dp.sparse.splu(a)
    for values in (np.ones(a.nnz - 1), np.ones(a.nnz, "f4"), np.ones((a.nnz, 1))):
        with pytest.raises(BadRequest, match=rf"values: got .*; expected f64\[{a.nnz}\], as in the matrix"):
            factors.refactorize(values)
    np.testing.assert_allclose(dense @ factors.solve(b).numpy(), b)


def test_splu_factorizes_when_it_is_made_and_of_values_of_its_own(rng):
    dev = dp.device("host")
    singular = sp.csr_array(np.array([[1.0, 0.0], [1.0, 0.0]]))
    for make in (dp.sparse.splu, dp.sparse.factorized):
        with pytest.raises(LinAlgError, match="singular"):
            make(singular)
    assert np.isnan(dp.sparse.splu(singular, check=False).solve(dev.array(np.ones(2)), check=False)[0].numpy()).all()
    dense, a = system(rng)
    b, factors = rng.standard_normal(12), dp.sparse.splu(a)
    a.values.copy_from(np.zeros(a.nnz))
    np.testing.assert_allclose(dense @ factors.solve(dev.array(b)).numpy(), b)
    given = dev.array(3 * factors.matrix.values.numpy())
    factors.refactorize(given)
    given.copy_from(np.zeros(a.nnz))
    np.testing.assert_allclose(3 * dense @ factors.solve(dev.array(b)).numpy(), b)
    with pytest.raises(LinAlgError, match="singular"):
        factors.refactorize(given)
    np.testing.assert_allclose(3 * dense @ factors.solve(dev.array(b)).numpy(), b)


def test_a_singular_matrix_is_told_by_the_function_that_was_called():
    a, b = sp.csr_array(np.array([[1.0, 0.0], [1.0, 0.0]])), np.ones(2)
    values = np.array([[1.0, 1.0], [2.0, 2.0]])
    unchecked = dp.sparse.splu(a, check=False)
    assert dp.sparse.factorized(sp.csr_array(np.eye(2)))(b) is not None
    for call, said, hint in (
        (lambda: dp.sparse.spsolve(a, b), "spsolve", "check=False"),
        (lambda: dp.sparse.splu(a), "splu", "check=False"),
        (lambda: dp.sparse.splu(a, values=values), "splu", "check=False"),
        (lambda: dp.sparse.factorized(a), "factorized", r"splu\(A, check=False\)"),
        (lambda: unchecked.solve(b), "SparseLu.solve", "check=False"),
        (lambda: unchecked.refactorize(a.data), "SparseLu.refactorize", "check=False"),
    ):
        with pytest.raises(LinAlgError, match=f"^{said}: .*singular.*Hint: {hint} returns") as caught:
            call()
        assert caught.value.routine == said


def test_a_matrix_of_scipys_in_csc_is_taken_too(rng):
    dense, _ = system(rng)
    b = rng.standard_normal(12)
    x = dp.sparse.spsolve(sp.csc_array(dense), dp.device("host").array(b))
    np.testing.assert_allclose(dense @ x.numpy(), b)


@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
@pytest.mark.parametrize("index", ["i4", "i8"])
def test_matrices_of_each_format_and_index_are_converted_and_solved(kind, index, rng):
    """Torch has indices of i64 alone, SciPy those of large matrices."""
    dev = dp.device("host")
    dense, _ = system(rng)
    matrix, b = sp.csr_array(dense).asformat(kind), rng.standard_normal(12)
    if kind == "coo":
        matrix.coords = tuple(part.astype(index) for part in matrix.coords)
    else:
        matrix.indptr, matrix.indices = matrix.indptr.astype(index), matrix.indices.astype(index)
    assert str(dp.sparse.sparse_tensor(matrix).index_dtype) == {"i4": "i32", "i8": "i64"}[index]
    np.testing.assert_allclose(dense @ dp.sparse.spsolve(matrix, dev.array(b)).numpy(), b)
    np.testing.assert_allclose(dense @ dp.sparse.splu(matrix).solve(dev.array(b)).numpy(), b)
    for name in ("csr", "csc", "coo"):
        found = getattr(dp.sparse, f"to{name}")(matrix)
        assert str(found.index_dtype) == "i32" or name == kind
        np.testing.assert_array_equal(found.validate().todense().numpy(), dense)


def test_indices_that_i32_does_not_hold_are_refused_by_the_conversion():
    dev = dp.device("host")
    one, zero = dev.array(np.ones(1)), dev.array(np.zeros(1, "i8"))
    with pytest.raises(
        BadRequest, match=r"columns: got indices from 4294967296 .* expected indices from 0 to 2147483647"
    ):
        dp.sparse.tocsr(dp.sparse.coo(one, zero, dev.array(np.array([2**32])), (3, 3)))
    with pytest.raises(BadRequest, match="at most 2147483647 rows, columns and elements"):
        dp.sparse.tocsr(dp.sparse.coo(one, zero, zero, (3, 2**31)))


def test_what_cannot_be_factorized_raises_in_the_function_and_not_in_the_request():
    dev = dp.device("host")
    singular, indefinite = sp.csr_array(np.array([[1.0, 0.0], [1.0, 0.0]])), sp.csr_array(np.diag([1.0, -1.0]))
    with pytest.raises(LinAlgError, match="singular"):
        dp.sparse.spsolve(singular, dev.array(np.ones(2)))
    with pytest.raises(LinAlgError, match="positive definite"):
        dp.sparse.spsolve(indefinite, dev.array(np.ones(2)), assume_a="pos")
    x, info = dp.sparse.spsolve(indefinite, dev.array(np.ones(2)), assume_a="pos", check=False)
    assert info.item() == 1
    assert np.isnan(x.numpy()).all()
