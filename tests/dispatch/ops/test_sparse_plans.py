"""The plans that call cuSPARSE, over a stand-in for it: every case of every row; what is kept, and what is not."""

import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow, Refused
from dispatch.keys import Arch
from dispatch.ops import FAMILIES
from dispatch.ops.sparse.cases import cases
from dispatch.ops.sparse.cases_ell import ELL_OPS
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("cusparse_stand_in", Path(__file__).parents[1] / "cusparse_stand_in.py")
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

ROWS = [row for row in dp.TABLE if row.op in FAMILIES["sparse"][1] and row.library == "cusparse"]
BESIDE = (
    *ELL_OPS,
    "sparse_sort",
    "prune_nnz",
    "prune_to_csr",
    "gpsv",
    "ilu0",
    "ic0",
    "spmm_op",
    "spmv_op",
)  # which test_sparse_further.py and test_sparse_compiled.py have
ROWS = [row for row in ROWS if row.op not in BESIDE]
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    pytest.importorskip("scipy")
    return stand_in.executor_of(monkeypatch)


@pytest.mark.parametrize(
    "every", [pytest.param(7, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, every, executor, rng):
    ran = 0
    for case in cases(row)[ROWS.index(row) % min(every, 3) :: every]:
        check = case.check(DEV, rng)
        request = check.request
        if any(rule(request) for rule in row.rules):
            continue
        plan = row.call(request, executor, row)
        for _ in range(2):  # the second over memory that the first has left
            check.renew()
            outputs = DEV.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            ran += 1
            if request.in_place and not request.repeatable:
                break  # it has overwritten what it reads
        executor.library.check_capture(plan)
    assert ran
    plan = None
    gc.collect()
    assert not executor.library.alive, "descriptors are given back"


def made(request, executor):
    row = select(request, Arch(90))
    return row.call(request, executor, row)


def enqueued(plan, request):
    outputs = DEV.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


def triangle(rng, n=12):
    dense = np.tril(rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.4), -1) + np.eye(n) * 3
    row, column = np.nonzero(dense)
    ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))])
    parts = (DEV.array(part) for part in (dense[row, column], ends.astype(np.int32), column.astype(np.int32)))
    return dense, dp.sparse.csr(*parts, (n, n))


def test_an_analysis_is_made_in_each_call_where_no_pattern_is_promised(executor, rng):
    dense, a = triangle(rng)
    x = rng.standard_normal(12)
    request = dp.SpsvRequest(*a, DEV.array(x))
    plan = made(request, executor)
    for _ in range(3):
        np.testing.assert_allclose(enqueued(plan, request).numpy(), np.linalg.solve(dense, x))
    assert executor.library.called.count("cusparseSpSV_analysis") == 3
    assert not plan.capture_safe


@pytest.mark.parametrize("op", ["spsv", "spsm"])
def test_an_analysis_of_a_fixed_pattern_is_kept_and_values_may_change(op, executor, rng):
    dense, a = triangle(rng)
    a = a.fixed()
    x = rng.standard_normal((12, 3) if op == "spsm" else 12)
    request = (dp.SpsmRequest if op == "spsm" else dp.SpsvRequest)(*a, DEV.array(x))
    plan = made(request, executor)
    np.testing.assert_allclose(enqueued(plan, request).numpy(), np.linalg.solve(dense, x))
    a.values.copy_from(a.values.numpy() * 2)
    np.testing.assert_allclose(enqueued(plan, request).numpy(), np.linalg.solve(2 * dense, x))
    called = [name for name in executor.library.called if "_analysis" in name or "_updateMatrix" in name]
    name = "cusparseSpSV" if op == "spsv" else "cusparseSpSM"
    assert called == [f"{name}_analysis", f"{name}_updateMatrix"]
    others = a.with_values(DEV.array(a.values.numpy() * 3))  # at another address
    np.testing.assert_allclose(
        enqueued(plan, request.replace(values=others.values)).numpy(), np.linalg.solve(6 * dense, x)
    )
    assert executor.library.called.count(f"{name}_analysis") == 1


def test_an_algorithm_of_a_newer_library_is_refused(executor, rng):
    _, a = triangle(rng)
    for version, words in (((12, 6, 3), "ALG2 needs cuSPARSE 12.9.4, has 12.6.3"), ((12, 9, 4), "")):
        executor.versions = {"cusparse": version}
        made(dp.SpsvRequest(*a, DEV.array(np.ones(12))), executor)
        request = dp.SpsvRequest(*a, DEV.array(np.ones(12)), algorithm="alg2")
        if words:
            with pytest.raises(Refused, match=words):
                made(request, executor)
        else:
            made(request, executor)


def test_indices_at_another_address_are_analysed_anew_whatever_was_promised(executor, rng):
    _, a = triangle(rng)
    a = a.fixed()
    x = rng.standard_normal(12)
    request = dp.SpsvRequest(*a, DEV.array(x))
    plan = made(request, executor)
    enqueued(plan, request)
    order = rng.permutation(12)
    dense = np.zeros((12, 12))
    count = a.nnz
    row, column = np.tril_indices(12)
    chosen = np.sort(
        np.concatenate([np.flatnonzero(row == column), rng.permutation(np.flatnonzero(row > column))[: count - 12]])
    )
    row, column = row[chosen], column[chosen]
    values = np.where(row == column, 3.0, 0.1 + order[row])
    dense[row, column] = values
    ends = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=12))]).astype(np.int32)
    parts = {"values": values, "rows": ends, "columns": column.astype(np.int32)}
    other = request.replace(**{name: DEV.array(part) for name, part in parts.items()})
    assert other.key() == request.key()
    np.testing.assert_allclose(enqueued(plan, other).numpy(), np.linalg.solve(dense, x))
    assert executor.library.called.count("cusparseSpSV_analysis") == 2


@pytest.mark.parametrize("algorithm", dp.SpmmAlgorithm)
@pytest.mark.parametrize("kind", ["csr", "csc", "coo"])
def test_every_algorithm_takes_a_request_or_its_row_refuses_it(algorithm, kind, executor, rng):
    if algorithm and not algorithm.name.startswith("COO" if kind == "coo" else "CSR"):
        pytest.skip("an algorithm of another format, which a request refuses")
    import scipy.sparse as sp

    dense = rng.standard_normal((6, 6)) * (rng.random((6, 6)) < 0.5)
    a = dp.sparse.sparse_tensor(getattr(sp.csr_array(dense), f"to{kind}")(), device="host")
    b = rng.standard_normal((6, 3))
    for trans, op in (("n", dense), ("t", dense.T)):
        request = dp.SpmmRequest(*a, DEV.array(b), algorithm=algorithm, trans=trans, library="cusparse")
        if algorithm.name == "CSR_ALG3" and (kind, trans) != ("csr", "n"):
            with pytest.raises(NoRow, match="needs CSR and trans n with CSR_ALG3"):
                made(request, executor)
        else:
            np.testing.assert_allclose(enqueued(made(request, executor), request).numpy(), op @ b)


def test_another_fixed_pattern_is_another_plan(rng):
    _, a = triangle(rng)
    x = DEV.array(rng.standard_normal(12))
    keys = {dp.SpsvRequest(*one, x).key() for one in (a, a.fixed(), a.fixed())}
    assert len(keys) == 3
    one = a.fixed()
    assert dp.SpsvRequest(*one, x).key() == dp.SpsvRequest(*one.with_values(DEV.array(np.ones(a.nnz))), x).key()


def test_descriptors_follow_the_addresses_of_each_run(executor, rng):
    for kind, block in (("csr", None), ("csc", None), ("coo", None), ("bsr", (2, 2))):
        import scipy.sparse as sp

        requests, expected = [], []
        for _ in range(2):
            places = np.stack([rng.permutation(8)[:6], rng.permutation(8)[:6]])
            matrix = sp.coo_array((rng.standard_normal(6), places), shape=(8, 8)).tocsr()
            if block is None:
                stored = getattr(matrix, f"to{kind}")()
            else:  # as many blocks in each
                dense = np.kron(np.eye(4)[rng.permutation(4)], np.ones((2, 2))) * rng.standard_normal((8, 8))
                stored = sp.bsr_array(dense, blocksize=block)
                matrix = sp.csr_array(dense)
            x = rng.standard_normal(8)
            a = dp.sparse.sparse_tensor(stored, device="host")
            requests.append(dp.SparseMvRequest(*a, DEV.array(x), library="cusparse"))
            expected.append(matrix @ x)
        assert requests[0].key() == requests[1].key()
        plan = made(requests[0], executor)
        for number in (0, 1, 0):
            np.testing.assert_allclose(enqueued(plan, requests[number]).numpy(), expected[number])
        assert plan.capture_safe


def test_what_the_library_does_not_support_is_a_refusal(executor, rng):
    _, a = triangle(rng)
    executor.library.refused.add("cusparseSpMV_bufferSize")
    with pytest.raises(Refused, match="CUSPARSE_STATUS_NOT_SUPPORTED"):
        made(dp.SparseMvRequest(*a, DEV.array(np.ones(12)), library="cusparse"), executor)


@pytest.mark.parametrize("algorithm", dp.SpmmAlgorithm)
def test_every_algorithm_is_the_library_s_number(algorithm):
    from cudabind.sys import cusparse

    theirs = {int(one): one.name for one in cusparse.cusparseSpMMAlg_t}
    assert theirs[int(algorithm)].removeprefix("CUSPARSE_SPMM_").removeprefix("ALG_") == algorithm.name


def test_autotune_races_the_algorithms_of_the_format_and_remembers_the_winner(executor, rng, monkeypatch, tmp_path):
    from dispatch.execute.algorithm_cache import AlgorithmCache
    from dispatch.ops.sparse import tune

    cache = AlgorithmCache("gpu", "cusparse", tmp_path)
    raced, raced_outside = [], []
    executor.algorithms = {"cusparse": cache}.__getitem__
    executor.refuse_capture = raced_outside.append

    def fastest(_, request, run, count):
        for number in range(count):
            run(number, request.arguments(DEV.executor().outputs(request)))
        raced.append(count)
        return 2

    monkeypatch.setattr(tune, "fastest", fastest)
    dense, a = triangle(rng)
    x = rng.standard_normal((12, 2))
    request = dp.SpmmRequest(*a, DEV.array(x), autotune=True, library="cusparse")
    plan = made(request, executor)
    np.testing.assert_allclose(enqueued(plan, request).numpy(), dense @ x)
    assert raced == [4]
    again = made(dp.SpmmRequest(*a.fixed(), DEV.array(x), autotune=True, library="cusparse"), executor)
    np.testing.assert_allclose(enqueued(again, request).numpy(), dense @ x)
    assert raced == [4]
    assert (
        AlgorithmCache("gpu", "cusparse", tmp_path).get("spmm", tune.stored_key(request)).blob
        == b'{"algorithm": "CSR_ALG2"}'
    )
    executor.library.refused.add("cusparseSpMV_bufferSize")
    with pytest.raises(Refused, match="cuSPARSE has no algorithm for this request"):
        made(dp.SparseMvRequest(*a, DEV.array(x[:, 0].copy()), autotune=True, library="cusparse"), executor)
    made(dp.SpmmRequest(*a, DEV.array(x), autotune=True, algorithm="csr_alg1"), executor)
    assert raced == [4], "an algorithm that is named is taken"
    assert raced_outside[0] == "a request with autotune=True"


@pytest.mark.parametrize(
    ("ours", "theirs"), [("SpmvAlgorithm", "SpMV"), ("SpsvAlgorithm", "SpSV"), ("SpgemmAlgorithm", "SpGEMM")]
)
def test_the_algorithms_have_the_library_s_numbers(ours, theirs):
    from cudabind.sys import cusparse

    known = {int(one) for one in getattr(cusparse, f"cusparse{theirs}Alg_t")}
    assert {int(one) for one in getattr(dp, ours)} <= known
    absent = {"SpMV": {5}}.get(theirs, set())  # SpMV of sliced ELL
    assert known - {int(one) for one in getattr(dp, ours)} <= absent


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_parts_that_are_not_at_16_bytes_are_copied_there_and_others_are_not(offset, executor, rng):
    y, indices = DEV.array(rng.standard_normal(40)), rng.permutation(40)[:9].astype(np.int32)
    at, values = DEV.zeros((9 + offset,), "i32")[offset:], DEV.zeros((9 + offset,), "f64")[offset:]
    at.copy_from(indices)
    request = dp.GatherRequest(y, at, out=values)
    plan = made(request, executor)
    np.testing.assert_array_equal(enqueued(plan, request).numpy(), y.numpy()[indices])
    assert len(plan._steps) == (3 if offset else 1)


def test_only_what_the_library_would_fault_at_is_copied(executor, rng):
    """Of COO all but three ways to multiply; parts at multiples of 16 bytes never."""
    b, parts = rng.standard_normal((8, 3)), (np.ones(5), np.arange(5, dtype="i4"), np.arange(5, dtype="i4"))
    for offset in (0, 1):
        places = []
        for part in parts:
            places.append(DEV.zeros((5 + offset,), str(part.dtype))[offset:])
            places[-1].copy_from(part)
        a = dp.sparse.coo(*places, (8, 8))
        for algorithm in dp.SpmmAlgorithm:
            if algorithm.name.startswith(("COO", "DEFAULT")):
                request = dp.SpmmRequest(*a, DEV.array(b), algorithm=algorithm)
                plan = made(request, executor)
                np.testing.assert_array_equal(enqueued(plan, request).numpy()[:5], b[:5])
                faults = algorithm.name in ("COO_ALG3", "DEFAULT")
                assert len(plan._steps) == (4 if offset and faults else 1)
