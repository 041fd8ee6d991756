"""Plans of products of two sparse matrices over the stand-in of cuSPARSE: fixed patterns, stamps, algorithms.

Requests are made into plans, and these enqueued, as in test_sparse_plans.py.
"""

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow

spec = importlib.util.spec_from_file_location("sparse_plans", Path(__file__).with_name("test_sparse_plans.py"))
sparse_plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sparse_plans)
executor, made, enqueued, triangle = (vars(sparse_plans)[name] for name in ("executor", "made", "enqueued", "triangle"))
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = sparse_plans.DEV = dp.device("host")


def test_a_wrong_number_of_elements_of_a_product_is_refused_and_nothing_is_written(executor, rng):
    _, a = triangle(rng)
    right = int(dp.spgemm_nnz(*a, *a).item())
    for algorithm in dp.SpgemmAlgorithm:
        request = dp.SpgemmRequest(*a, *a, nnz=right, algorithm=algorithm)
        if algorithm.name.startswith("CSR_ALG"):
            with pytest.raises(NoRow, match=f"needs spgemm of fixed patterns.*for {algorithm.name}"):
                made(request, executor)
            continue
        values, *_ = enqueued(made(request, executor), request)
        assert np.isfinite(values.numpy()).all()
    out = DEV.array(np.full(right + 1, 5.0))
    request = dp.SpgemmRequest(*a, *a, nnz=right + 1, out_values=out)
    with pytest.raises(BadRequest, match=f"nnz: got {right + 1}; expected {right}"):
        enqueued(made(request, executor), request)
    assert (out.numpy() == 5).all()
    assert "cusparseSpGEMM_estimateMemory" in executor.library.called


def fixed_pair(rng):
    """Two fixed matrices whose product's elements are told beside them, and how many these are."""
    import scipy.sparse as sp

    found = []
    for shape in ((9, 12), (12, 7)):
        dense = rng.standard_normal(shape) * (rng.random(shape) < 0.3)
        found.append(dp.sparse.sparse_tensor(sp.csr_array(dense), device="host").fixed())
    return *found, int(dp.spgemm_nnz(*found[0], *found[1]).item())


def as_dense(result, shape):
    """A product as a dense matrix."""
    import scipy.sparse as sp

    values, rows, columns = (part.numpy() for part in result)
    return sp.csr_array((values, columns, rows), shape).toarray()


def called_of(executor, name):
    return sum(one.startswith(name) for one in executor.library.called)


@pytest.mark.parametrize("algorithm", ["default", "csr_alg_determinitic", "csr_alg_nondeterminitic"])
def test_a_product_of_fixed_patterns_is_analysed_once_and_computed_for_the_values_of_each_run(algorithm, executor, rng):
    a, b, nnz = fixed_pair(rng)
    request = dp.SpgemmRequest(*a, *b, nnz=nnz, alpha=-0.5, algorithm=algorithm)
    plan = made(request, executor)
    assert not plan.capture_safe
    for turn in range(3):
        expected = -0.5 * dp.sparse.todense(a).numpy() @ dp.sparse.todense(b).numpy()
        np.testing.assert_allclose(as_dense(enqueued(plan, request), (9, 7)), expected, atol=1e-12)
        a.values.copy_from(a.values.numpy() * (turn + 2))
        b = b.with_values(DEV.array(rng.standard_normal(b.nnz)))  # at another address
        request = request.replace(b_values=b.values)
    assert called_of(executor, "cusparseSpGEMMreuse_copy") == 2, "its size, and itself"
    assert called_of(executor, "cusparseSpGEMMreuse_compute") == (0 if algorithm == "default" else 3)
    descriptors = ("cusparseSpGEMM_createDescr", "cusparseSpGEMM_destroyDescr")
    assert called_of(executor, "cusparseSpGEMM_") == sum(called_of(executor, name) for name in descriptors)
    plan = None
    gc.collect()
    assert not executor.library.alive


def test_a_product_over_indices_at_another_address_is_analysed_anew_whatever_was_promised(executor, rng):
    a, b, nnz = fixed_pair(rng)
    request = dp.SpgemmRequest(*a, *b, nnz=nnz)
    plan = made(request, executor)
    enqueued(plan, request)
    other = request.replace(columns=DEV.array((a.columns.numpy() + 1) % 12))
    assert other.key() == request.key()
    expected = dp.sparse.csr(a.values, a.rows, other.columns, a.shape).todense().numpy() @ b.todense().numpy()
    if np.count_nonzero(expected) == nnz:
        np.testing.assert_allclose(as_dense(enqueued(plan, other), (9, 7)), expected, atol=1e-12)
    else:
        with pytest.raises(BadRequest, match=f"nnz: got {nnz}"):
            enqueued(plan, other)
    np.testing.assert_allclose(
        as_dense(enqueued(plan, request), (9, 7)), a.todense().numpy() @ b.todense().numpy(), atol=1e-12
    )
    assert called_of(executor, "cusparseSpGEMMreuse_workEstimation") == 6


@pytest.mark.parametrize("fixed", [False, True])
def test_autotune_times_the_algorithms_of_a_sparse_product_by_plain_calls(fixed, executor, rng, monkeypatch, tmp_path):
    from dispatch.execute.algorithm_cache import AlgorithmCache
    from dispatch.ops.sparse import tune

    executor.algorithms = {"cusparse": AlgorithmCache("gpu", "cusparse", tmp_path)}.__getitem__
    executor.refuse_capture = lambda _: None
    raced = []

    def fastest_call(_, request, run, count):
        for number in range(count):
            run(number, request.arguments(DEV.executor().outputs(request)))
        raced.append(count)
        return count - 1

    monkeypatch.setattr(tune, "fastest_call", fastest_call)
    a, b, nnz = fixed_pair(rng)
    if not fixed:
        a, b = (dp.sparse.csr(one.values, one.rows, one.columns, one.shape) for one in (a, b))
    request = dp.SpgemmRequest(*a, *b, nnz=nnz, autotune=True)
    expected = a.todense().numpy() @ b.todense().numpy()
    for _ in range(2):
        found = enqueued(made(request, executor), request)
        np.testing.assert_allclose(as_dense(found, (9, 7)), expected, atol=1e-12)
    assert raced == [6 if fixed else 4], "what has won is remembered"
    assert executor.algorithms("cusparse").get("spgemm", tune.stored_key(request)).blob == b'{"algorithm": "ALG3"}'


def test_what_a_count_has_made_is_left_to_the_product_with_its_stamp_and_to_no_other(executor, rng):
    a, b, nnz = fixed_pair(rng)
    a, b = (dp.sparse.csr(one.values, one.rows, one.columns, one.shape) for one in (a, b))
    expected = 3 * a.todense().numpy() @ b.todense().numpy()
    plans, multiplied = {}, []
    for kind, stamp, alpha in (
        *(("count", 1, 3.0), ("product", 1, 3.0), ("product", 1, 3.0)),  # what is left is taken once
        *(("count", 2, 3.0), ("product", 3, 3.0), ("count", None, 3.0), ("product", None, 3.0)),
        *(("count", 4, 1.0), ("product", 4, 3.0), ("count", 5, 3.0), ("product", 5, 3.0)),
    ):
        if kind == "count":
            request = dp.SpgemmNnzRequest(*a, *b, stamp=stamp, alpha=alpha)
        else:
            request = dp.SpgemmRequest(*a, *b, nnz=nnz, stamp=stamp, alpha=alpha)
        plan = plans.setdefault(request.key(), None) or made(request, executor)
        plans[request.key()] = plan
        before = executor.library.called.count("cusparseSpGEMM_compute")
        found = enqueued(plan, request)
        multiplied.append((executor.library.called.count("cusparseSpGEMM_compute") - before) // 2)
        if kind == "count":
            assert found.item() == nnz
        else:
            np.testing.assert_allclose(as_dense(found, (9, 7)), expected, atol=1e-12)
    assert multiplied == [1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0]
    assert len(plans) == 5, "stamps are no part of a plan"
