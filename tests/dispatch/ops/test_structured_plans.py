"""The plans that call cuSPARSELt, over a stand-in for it: every case of every row; biases, algorithms, refusals."""

import gc
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, Refused
from dispatch.keys import Arch
from dispatch.ops.structured import rules
from dispatch.ops.structured.cases import cases
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location(
    "cusparselt_stand_in", Path(__file__).parents[1] / "cusparselt_stand_in.py"
)
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)

ROWS = [row for row in dp.TABLE if row.op.endswith("_2_4") and row.library == "cusparseLt"]
S = dp.structured
DEV = None


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    return stand_in.executor_of(monkeypatch)


@pytest.mark.parametrize(
    "every", [pytest.param(4, id="sample"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, every, executor, rng):
    ran = 0
    for case in cases(row)[ROWS.index(row) % every :: every]:
        check = case.check(DEV, rng)
        request = check.request
        assert not any(rule(request) for rule in row.rules), "cases are those that the row takes"
        plan = row.call(request, executor, row)
        for _ in range(2):  # the second over memory that the first has left
            check.renew()
            outputs = DEV.executor().outputs(request)
            plan.enqueue(request.arguments(outputs))
            check.verify(request.result(outputs))
            ran += 1
            if not request.repeatable:
                break  # it has overwritten what it reads
        assert plan.capture_safe
    assert ran
    plan = None
    gc.collect()
    assert not left(executor), "structs are given back"


def left(executor):
    """What is alive beside the handle and descriptors of products, which the library has no end for."""
    return [one for one in executor.library.alive.values() if one != "handle" and not hasattr(one, "structs")]


def made(request, executor, library="cusparseLt"):
    row = select(request, Arch(90))
    assert row.library == library
    return row.call(request, executor, row)


def enqueued(plan, request):
    outputs = DEV.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


def operands(rng, m=32, k=64, n=16):
    dense = S.prune(DEV.array(rng.standard_normal((m, k)).astype("f2")))
    return dense.numpy().astype("f8"), S.compress(dense), DEV.array(rng.standard_normal((k, n)).astype("f2"))


def close(got, expected):
    np.testing.assert_allclose(got.numpy().astype("f8"), expected, rtol=2e-3, atol=2e-3)


def test_a_plan_follows_the_addresses_of_each_run_the_bias_s_too(executor, rng):
    dense, a, b = operands(rng)
    biases = [DEV.array(rng.standard_normal(32).astype("f2")) for _ in range(18)]
    requests = [dp.Matmul24Request(*a, b, bias=bias) for bias in biases]
    assert requests[0].key() == requests[1].key()
    plan, called = made(requests[0], executor), executor.library.called

    def runs(*numbers):
        for number in numbers:
            expected = dense @ b.numpy().astype("f8") + biases[number].numpy().astype("f8")[:, None]
            close(enqueued(plan, requests[number]), expected)

    runs(0, 1, 1, 0)
    # once at first, where no bias is, and for each of the two: a plan that was destroyed is not made anew
    assert called.count("cusparseLtMatmulPlanInit") == 3
    assert "cusparseLtMatmulPlanDestroy" not in called
    runs(*range(18), 0)
    assert called.count("cusparseLtMatmulPlanInit") == 1 + 18 + 1, "16 are kept"
    assert called.count("cusparseLtMatmulPlanDestroy") == 3
    assert called.count("cusparseLtMatmulAlgSelectionDestroy") == 3


def test_factors_are_those_of_each_run_and_beta_0_reads_no_c(executor, rng):
    dense, a, b = operands(rng)
    product, c = dense @ b.numpy().astype("f8"), DEV.array(rng.standard_normal((32, 16)).astype("f2"))
    request = dp.Matmul24Request(*a, b, c=c, alpha=2, beta=0.5)
    plan = made(request, executor)
    close(enqueued(plan, request), 2 * product + 0.5 * c.numpy().astype("f8"))
    other = dp.Matmul24Request(*a, b, c=c, alpha=-1, beta=3)
    assert other.key() == request.key()
    close(enqueued(plan, other), -product + 3 * c.numpy().astype("f8"))
    unread = dp.Matmul24Request(*a, b, c=DEV.array(np.full((32, 16), np.nan, "f2")), beta=0)
    assert unread.key() != request.key()
    close(enqueued(made(unread, executor), unread), product)


def test_a_bound_that_is_not_finite_is_the_library_s_own(executor, rng):
    dense, a, b = operands(rng)
    request = dp.Matmul24Request(*a, b, activation="relu")
    close(enqueued(made(request, executor), request), np.maximum(dense @ b.numpy().astype("f8"), 0))


def test_what_the_library_does_not_support_is_a_refusal(executor, rng):
    _, a, b = operands(rng)
    request = dp.Matmul24Request(*a, b)
    for name in ("StructuredDescriptorInit", "MatmulDescriptorInit", "MatmulPlanInit"):
        executor.library.refused = {f"cusparseLt{name}"}
        with pytest.raises(Refused, match=f"cusparseLt{name} rejects the request.*NOT_SUPPORTED"):
            made(request, executor)
    executor.library.refused = set()
    with pytest.raises(Refused, match="cusparseLtMatmulAlgSetAttribute rejects the request"):
        made(dp.Matmul24Request(*a, b, split_k=4), executor)  # on sm_90 it is 1 or -1
    with pytest.raises(Refused, match="config_id 7 is not below 7, the number of kernels"):
        made(dp.Matmul24Request(*a, b, config_id=stand_in.KERNELS), executor)
    gc.collect()
    assert not left(executor)


@pytest.mark.parametrize(
    ("a", "d", "archs"),
    [("f8e4m3", "bf16", {90, 100}), ("f8e4m3", "f16", {100}), ("f8e5m2", "bf16", {90}), ("f8e5m2", "f16", set())],
)
def test_gelu_is_there_for_other_dtypes_before_sm_100_than_from_there_on(a, d, archs, rng):
    half = S.compress(S.prune(DEV.array(rng.standard_normal((32, 64)).astype(dp.Dtype.of(a).numpy))))
    b = DEV.array(rng.standard_normal((16, 64)).astype(dp.Dtype.of(a).numpy)).T
    request = dp.Matmul24Request(*half, b, activation="gelu", out_dtype=d)
    assert not rules.gelu_dtypes(request) or not archs, "the host has what any GPU has"
    for arch in (90, 100):
        reason = rules.gelu_dtypes(_on(request, f"cusparseLt 0.8.0 sm_{arch}"))
        assert ("" if arch in archs else f"has {a} to {d}") in reason
        assert bool(reason) == (arch not in archs)


def test_later_kernels_are_refused_where_some_fault(rng):
    _, a, b = operands(rng)
    plain, asked = dp.Matmul24Request(*a, b), dp.Matmul24Request(*a, b, config_id=rules.SAFE_KERNELS)
    first = dp.Matmul24Request(*a, b, config_id=rules.SAFE_KERNELS - 1)
    assert not rules.safe_kernels(asked), "the host has no kernels that fault"
    for stamp, faulty in (
        ("0.8.0 sm_90", 1),
        ("0.8.1 sm_90", 1),
        ("0.8.0 sm_80", 0),
        ("0.9.0 sm_90", 0),
        ("0.8.0 sm_900", 0),
    ):
        assert not rules.safe_kernels(_on(plain, f"cusparseLt {stamp}"))
        assert not rules.safe_kernels(_on(first, f"cusparseLt {stamp}"))
        reason = rules.safe_kernels(_on(asked, f"cusparseLt {stamp}"))
        assert bool(reason) == bool(faulty)
        assert not faulty or ("has 30" in reason and "illegal instruction" in reason and stamp in reason)
    assert all(rules.safe_kernels in row.rules for row in ROWS if row.op == "matmul_2_4")


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_f32_takes_a_column_major_b_alone_where_the_library_plans_others_without_end(dtype, rng):
    chosen = {"compute": "tf32"} if dtype == "f32" else {}
    half = S.compress(S.prune(DEV.array(rng.standard_normal((32, 64)).astype(dp.Dtype.of(dtype).numpy))))
    by_rows = DEV.array(rng.standard_normal((64, 16)).astype(dp.Dtype.of(dtype).numpy))
    by_columns = by_rows.T.copy().T
    for stamp, ends in (("0.8.0 sm_90", False), ("0.8.0 sm_80", True), ("0.9.0 sm_90", True)):
        for b in (by_rows, by_columns):
            reason = rules.columns_of_f32(_on(dp.Matmul24Request(*half, b, **chosen), f"cusparseLt {stamp}"))
            refused = dtype == "f32" and b is by_rows and not ends
            assert bool(reason) == refused
            assert not refused or ("b column-major" in reason and stamp in reason and "copy it" in reason)
    assert all(rules.columns_of_f32 in row.rules for row in ROWS if row.op == "matmul_2_4")


def _on(request, made_by):
    """The request, as if a GPU had compressed A; no request of the host's may say so."""
    return SimpleNamespace(
        activation=request.activation,
        autotune=request.autotune,
        config_id=request.config_id,
        a_dtype=request.a_dtype,
        d_dtype=request.d_dtype,
        b=request.b,
        form=request.form._replace(made_by=made_by),
    )


def test_what_is_asked_of_the_algorithm_is_said(monkeypatch, rng):
    executor = stand_in.executor_of(monkeypatch, arch=80)
    dense, a, b = operands(rng)
    request = dp.Matmul24Request(*a, b, split_k=4, split_k_mode="two_kernels", split_k_buffers=2, config_id=3)
    plan = made(request, executor)
    assert plan.algorithm == (3, 4, 2, 2)
    close(enqueued(plan, request), dense @ b.numpy().astype("f8"))


def test_autotune_searches_once_and_remembers_what_was_found(executor, rng, monkeypatch, tmp_path):
    from dispatch.execute.algorithm_cache import AlgorithmCache
    from dispatch.ops.structured import tune

    class Copies:
        def __init__(self, _, request):
            self.request = request.replace(b=request.b.copy())
            self.outputs = DEV.executor().outputs(request)

        def arguments(self, _):
            return self.request.arguments(self.outputs)

        def __del__(self):
            self.request.b.copy_from(np.full(self.request.b.shape, np.nan))  # as memory that is somebody else's

    cache = AlgorithmCache("gpu", "cusparseLt", tmp_path)
    executor.algorithms = {"cusparseLt": cache}.__getitem__
    refused = []
    executor.refuse_capture = refused.append
    monkeypatch.setattr(tune, "OperandCopies", Copies)
    dense, a, b = operands(rng)
    request = dp.Matmul24Request(*a, b, autotune=True)
    expected = dense @ b.numpy().astype("f8")
    for _ in range(2):
        plan = made(request, executor)
        assert plan.algorithm == (4, 1, 0, 0)
        close(enqueued(plan, request), expected)
    assert executor.library.called.count("cusparseLtMatmulSearch") == 1
    assert refused == ["a request with autotune=True"]
    named = dp.Matmul24Request(*a, b, autotune=True, config_id=2)
    assert made(named, executor).algorithm[0] == 2, "an algorithm that is named is taken"
    assert executor.library.called.count("cusparseLtMatmulSearch") == 1
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text().replace("matmul_2_4", "other"))
    executor.algorithms = lambda _: AlgorithmCache("gpu", "cusparseLt", tmp_path)
    made(request, executor)
    assert executor.library.called.count("cusparseLtMatmulSearch") == 2


def test_where_some_kernels_fault_the_first_ones_race_and_nothing_is_searched(executor, rng, monkeypatch, tmp_path):
    from dispatch.execute.algorithm_cache import AlgorithmCache
    from dispatch.ops.structured import tune

    executor.algorithms = {"cusparseLt": AlgorithmCache("gpu", "cusparseLt", tmp_path)}.__getitem__
    executor.refuse_capture = lambda _: None
    raced = []

    def fastest(_, request, run, count):
        outputs = DEV.executor().outputs(request)
        for number in range(count):
            run(number, request.arguments(outputs))
        raced.append(count)
        return 3

    monkeypatch.setattr(tune, "fastest", fastest)
    monkeypatch.setattr(tune, "is_faulty", lambda _: True)
    dense, a, b = operands(rng)
    request = dp.Matmul24Request(*a, b, autotune=True)
    for _ in range(2):
        plan = made(request, executor)
        assert plan.algorithm == (3, 1, 0, 0)
        close(enqueued(plan, request), dense @ b.numpy().astype("f8"))
    assert raced == [stand_in.KERNELS], "once, among as many as there are"
    monkeypatch.setattr(tune, "SAFE_KERNELS", 4)
    other = dp.Matmul24Request(*a, b, autotune=True, alpha=1.0, activation="relu")
    assert made(other, executor).algorithm[0] == 3
    assert raced[1:] == [4], "the later ones run nowhere"
    assert not executor.library.called.count("cusparseLtMatmulSearch")


def test_bytes_of_another_version_or_gpu_are_refused(executor, rng, monkeypatch):
    _, a, b = operands(rng)
    monkeypatch.setattr(stand_in.plans, "library_stamp", lambda _: "cusparseLt 0.9 sm_90")
    with pytest.raises(BadRequest, match=r"form\.made_by: got 'host'; expected 'cusparseLt 0\.9 sm_90'.*compress the"):
        made(dp.Matmul24Request(*a, b), executor)


def test_bytes_of_another_size_than_the_library_s_are_refused(executor, rng, monkeypatch):
    _, a, b = operands(rng)
    monkeypatch.setattr(stand_in.plans, "compressed_bytes", lambda *_: (a.nbytes + 16, 0))
    with pytest.raises(BadRequest, match=rf"a: got u8\[{a.nbytes}\]; expected u8\[{a.nbytes + 16}\]"):
        made(dp.Matmul24Request(*a, b), executor)
    with pytest.raises(BadRequest, match="out: got u8"):
        made(dp.Compress24Request(a.todense()), executor)


def test_a_batch_is_compressed_and_multiplied_matrix_by_matrix(executor, rng):
    dense = S.prune(DEV.array(rng.standard_normal((3, 32, 64)).astype("f2")))
    request = dp.Compress24Request(dense)
    data = enqueued(made(request, executor), request)
    assert executor.library.called.count("cusparseLtSpMMACompress2") == 3
    b = DEV.array(rng.standard_normal((64, 16)).astype("f2"))  # one for all
    bias = DEV.array(rng.standard_normal((3, 32)).astype("f2"))
    product = dp.Matmul24Request(data, request.form, b, bias=bias)
    expected = dense.numpy().astype("f8") @ b.numpy().astype("f8") + bias.numpy().astype("f8")[..., None]
    close(enqueued(made(product, executor), product), expected)
    assert executor.library.called.count("cusparseLtMatmul") == 3


@pytest.mark.parametrize("wrong", [None, 0, 2])
@pytest.mark.parametrize("by_rows", [True, False])
def test_the_check_of_a_batch_answers_for_all_its_matrices(wrong, by_rows, executor):
    values = np.zeros((3, 32, 64), "f2")
    if wrong is not None:
        values[wrong, -1, -3:] = 1
    a = DEV.array(values) if by_rows else DEV.array(np.ascontiguousarray(values.swapaxes(1, 2))).mT
    request = dp.Check24Request(a, out=DEV.array(np.full(1, 0x5A5A5A5A, "i4")))
    assert enqueued(made(request, executor), request).item() == (wrong is not None)


def test_d_lies_as_c_does(executor, rng):
    dense, a, b = operands(rng)
    for c in (DEV.array(np.ones((32, 16), "f2")), DEV.array(np.ones((16, 32), "f2")).T):
        request = dp.Matmul24Request(*a, b, c=c)
        found = enqueued(made(request, executor), request)
        assert found.strides == c.strides
        close(found, dense @ b.numpy().astype("f8") + 1)


def test_a_product_without_columns_calls_nothing(executor, rng):
    _, a, _ = operands(rng)
    request = dp.Matmul24Request(*a, DEV.zeros((64, 0), "f16"))
    assert enqueued(made(request, executor), request).shape == (32, 0)
    assert "cusparseLtMatmulPlanInit" not in executor.library.called


@pytest.mark.parametrize(
    ("ours", "theirs", "but"),
    [
        ("PruneAlgorithm", "cusparseLtPruneAlg_t", "CUSPARSELT_PRUNE_SPMMA_"),
        ("SplitKMode", "cusparseLtSplitKMode_t", ""),
    ],
)
def test_members_have_the_library_s_numbers(ours, theirs, but):
    from cudabind.sys import cusparseLt

    known = {int(one): one.name for one in getattr(cusparseLt, theirs)}
    for member in getattr(dp, ours):
        name = known[int(member)].removeprefix(but).removeprefix("CUSPARSELT_").removeprefix("SPLIT_K_MODE_")
        assert name.replace("INVALID_MODE", "DEFAULT") == member.name
