"""Batches of direct solves, and choices of single ones: plans over a stand-in of cuDSS, what is refused, the host."""

import ctypes
import gc
import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import Arch
from dispatch.libraries.nvrtc.kernel import Kernel
from dispatch.ops.sparse import cudss_batched as batched
from dispatch.ops.sparse.cases import cases
from dispatch.table.select import select

sp = pytest.importorskip("scipy.sparse")


def module_at(name):
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cudss, cusparse = map(module_at, ("cudss_stand_in", "cusparse_stand_in"))
ROWS = [row for row in dp.TABLE.of("spsolve_batched") if row.library == "cudss" and not row.variant]
ANALYSIS, FACTORIZATION, REFACTORIZATION, SOLVE = 3, 4, 8, 1008
DEV = None
S, CONFIG = dp.sparse, cudss.CONFIG
N, BATCH = 12, 4


@pytest.fixture(autouse=True)
def dev():
    """The host as it is now: a test of another file may have closed the one before."""
    global DEV
    DEV = dp.device("host")


@pytest.fixture
def executor(monkeypatch):
    yield cudss.executor_of(monkeypatch, cusparse.Copy)
    gc.collect()  # what a plan holds is given back to the stand-in


@pytest.fixture
def batch(rng):
    """The matrices of a batch, their pattern, and their elements."""
    mask = (rng.random((N, N)) < 0.4) | np.eye(N, dtype=bool)
    dense = rng.standard_normal((BATCH, N, N)) * mask + 5 * np.eye(N)
    return dense, S.sparse_tensor(sp.csr_array(dense[0])), np.ascontiguousarray(dense[:, mask])


def made(request, executor):
    row = select(request, Arch(90))
    return row.call(request, executor, row)


def enqueued(plan, request):
    outputs = request.device.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    return request.result(outputs)


def request_of(a, values, b, **choices):
    return dp.BatchedSpsolveRequest(DEV.array(values), a.rows, a.columns, a.form, DEV.array(b), **choices)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_plan_says_what_the_library_is_to_know(row, executor, rng):
    for case in cases(row):
        check = case.check(DEV, rng)
        assert not any(rule(check.request) for rule in row.rules), check.request.describe()
        plan = row.call(check.request, executor, row)
        assert not plan.capture_safe
        for _ in range(2):
            check.renew()
            check.verify(enqueued(plan, check.request))
    plan = None
    gc.collect()
    assert executor.library.alive == {1: "handle"}, "all is given back"


def test_a_batch_is_analysed_and_factorized_at_once_and_kept(executor, rng, batch):
    dense, a, values = batch
    a = a.fixed()
    plan = None
    for stamp, factor in ((1, 1), (1, 1), (2, 3)):
        b = rng.standard_normal((BATCH, N))
        request = request_of(a, values * factor, b, stamp=stamp)
        plan = plan or made(request, executor)
        x, info = enqueued(plan, request)
        np.testing.assert_allclose(x.numpy(), np.linalg.solve(dense * factor, b[..., None])[..., 0])
        assert not info.numpy().any()
    assert executor.library.phases[:3] == [ANALYSIS, FACTORIZATION, SOLVE]
    assert ANALYSIS not in executor.library.phases[1:]


@pytest.mark.parametrize("wrong", [0, 2, BATCH - 1])
@pytest.mark.parametrize("kind", ["gen", "pos"])
def test_one_that_cannot_be_factorized_is_told_and_the_others_are_right(wrong, kind, executor, rng, batch):
    dense, a, values = batch
    if kind == "pos":
        dense, a = (
            np.array([np.diag(rng.uniform(1, 2, N)) for _ in range(BATCH)]),
            S.sparse_tensor(sp.eye_array(N, format="csr")),
        )
        values = np.array([np.diag(one) for one in dense])
        values[wrong, 3] = -1
    else:
        values[wrong] = 0
    b = rng.standard_normal((BATCH, N, 2))
    request = request_of(a.fixed(), values, b, assume_a=kind)
    plan = made(request, executor)
    for _ in range(2):
        x, info = (found.numpy() for found in enqueued(plan, request))
        assert (info != 0).tolist() == [number == wrong for number in range(BATCH)]
        assert (info[wrong] > 0) == (kind == "pos")
        for number in set(range(BATCH)) - {wrong}:
            np.testing.assert_allclose(dense[number] @ x[number], b[number], atol=1e-9)
    values[wrong] = values[wrong - 1]
    request.values.copy_from(values)
    x, info = (found.numpy() for found in enqueued(plan, request))
    assert not info.any(), "once all can be factorized they are so together again"


# -- choices ----------------------------------------------------------------------------------------------------------
def settings(library):
    """What the configurations of all factors were told."""
    return [thing for thing in library.alive.values() if isinstance(thing, dict)]


def test_choices_reach_the_library_before_the_analysis(executor, rng, batch):
    _, a, values = batch
    b = rng.standard_normal(N)
    for choices, wanted in (
        ({}, {}),
        ({"refinements": 3}, {CONFIG.CUDSS_CONFIG_IR_N_STEPS: 3}),
        ({"refinements": 0}, {}),
        ({"memory": "hybrid"}, {CONFIG.CUDSS_CONFIG_HYBRID_MEMORY_MODE: 1}),
        (
            {"memory": "hybrid", "device_memory": 1 << 33},
            {CONFIG.CUDSS_CONFIG_HYBRID_MEMORY_MODE: 1, CONFIG.CUDSS_CONFIG_HYBRID_DEVICE_MEMORY_LIMIT: 1 << 33},
        ),
    ):
        request = dp.SpsolveRequest(*a, DEV.array(b), **choices)
        plan = made(request, executor)
        enqueued(plan, request)
        assert settings(executor.library) == [wanted]
        plan = None
        gc.collect()
    request = request_of(a, values, np.ones((BATCH, N)), refinements=1)
    plan = made(request, executor)
    enqueued(plan, request)
    assert settings(executor.library) == [{CONFIG.CUDSS_CONFIG_UBATCH_SIZE: BATCH, CONFIG.CUDSS_CONFIG_IR_N_STEPS: 1}]


@pytest.mark.parametrize("is_early", [False, True])
def test_too_little_memory_is_told_with_the_least_that_there_must_be(is_early, executor, batch):
    _, a, _ = batch
    executor.library.is_early = is_early
    request = dp.SpsolveRequest(*a.fixed(), DEV.array(np.ones(N)), memory="hybrid", device_memory=4095)
    plan = made(request, executor)
    for _ in range(2):
        with pytest.raises(BadRequest, match=r"device_memory: got 4095; expected 4096 bytes .*device_memory=4096"):
            enqueued(plan, request)
    assert executor.library.phases == [ANALYSIS] * (4 if is_early else 2), "nothing is factorized"
    assert settings(executor.library)[0][CONFIG.CUDSS_CONFIG_HYBRID_DEVICE_MEMORY_LIMIT] == 4095, "as it was"


def test_libraries_refuse_by_name_what_they_do_not_have(batch):
    _, a, values = batch
    b = DEV.array(np.ones(N))
    for choices, words in (
        ({"memory": "hybrid"}, "needs memory device, has hybrid"),
        ({"refinements": 2}, "needs no refinements, has 2"),
        ({"precision": "f32"}, "needs precision None, has F32"),
    ):
        with pytest.raises(NoRow, match=words):
            select(dp.SpsolveRequest(*a, b, library="cusolverSp", **choices), Arch(90))
    with pytest.raises(NoRow, match="needs memory device, has hybrid"):
        select(request_of(a, values, np.ones((BATCH, N)), memory="hybrid"), Arch(90))
    with pytest.raises(NoRow, match="pass out=None"):
        select(request_of(a, values, np.ones((BATCH, N)), out=DEV.zeros((N, BATCH), "f64").T), Arch(90))


# -- requests and the host --------------------------------------------------------------------------------------------
def test_bad_requests_are_refused_by_name(batch):
    _, a, values = batch
    good = np.ones((BATCH, N))
    for changed, words in (
        ({"values": values[:, 1:]}, rf"columns: .*expected i32\[{a.nnz - 1}\]"),
        ({"values": values[0]}, r"values: .*\(batch, nnz\) of at least one matrix.*for one matrix use spsolve"),
        ({"values": values[:0], "b": good[:0]}, r"values: .*at least one matrix"),
        ({"b": good[1:]}, r"b: got f64\[3, 12\].*f64\[4, 12\] or \[4, 12, 1 or more\], because values has 4 matrices"),
        ({"b": good[0]}, "b: "),
        ({"b": np.ones((BATCH, N, 0))}, "b: "),
        ({"b": np.ones((BATCH, N + 1))}, "b: "),
        ({"b": good.astype("f4")}, "b: got f32"),
        ({"uplo": "lower"}, "uplo: "),
        ({"stamp": -1}, "stamp"),
        ({"assume_a": "band"}, "assume_a"),
        ({"memory": "unified"}, "memory"),
        ({"device_memory": 1 << 20}, 'device_memory: got 1048576; expected None, .*memory="hybrid"'),
        ({"memory": "hybrid", "device_memory": 0}, "device_memory"),
        ({"refinements": -1}, "refinements"),
        ({"precision": "bf16"}, "precision"),
        ({"info": DEV.zeros((BATCH + 1,), "i32")}, "info"),
        ({"out": DEV.zeros((BATCH, N + 1), "f64")}, "out"),
    ):
        given = {"values": values, "b": good, **changed}
        parts = DEV.array(given.pop("values")), a.rows, a.columns, a.form, DEV.array(given.pop("b"))
        with pytest.raises(BadRequest, match=words):
            dp.spsolve_batched(*parts, **given)
    with pytest.raises(BadRequest, match=r"values: .*dense memory.*x.copy\(\)"):
        dp.spsolve_batched(DEV.array(values.T.copy()).T, a.rows, a.columns, a.form, DEV.array(good))
    with pytest.raises(BadRequest, match=r"form\.format: got CSC; expected CSR"):
        dp.spsolve_batched(DEV.array(values), a.columns, a.rows, a.T.form, DEV.array(good))
    with pytest.raises(BadRequest, match="precision: got F32; expected None for f32"):
        dp.spsolve(*S.sparse_tensor(sp.eye_array(3, format="csr", dtype="f4")), DEV.zeros(3, "f32"), precision="f32")
    wide = a.form._replace(shape=(N, N + 1))
    with pytest.raises(BadRequest, match=r"form\.shape"):
        dp.spsolve_batched(DEV.array(values), a.rows, a.columns, wide, DEV.array(good))


@pytest.mark.parametrize("shape", [(BATCH, N), (BATCH, N, 3)])
def test_spsolve_and_splu_over_a_batch_in_scipys_words(shape, rng, batch):
    dense, a, values = batch
    b = rng.standard_normal(shape)
    wide = b if b.ndim == 3 else b[..., None]
    x = S.spsolve(a, DEV.array(b), values=DEV.array(values)).numpy()
    np.testing.assert_allclose(x, np.linalg.solve(dense, wide).reshape(shape))
    factors = S.splu(a, values=DEV.array(values))
    assert repr(factors).endswith(", batch of 4)")
    np.testing.assert_allclose(factors.solve(DEV.array(b)).numpy(), x)
    turned = DEV.array(np.moveaxis(b, 0, -1).copy())
    order = (b.ndim - 1, *range(b.ndim - 1))
    np.testing.assert_allclose(factors.solve(turned.transpose(order)).numpy(), x)
    factors.refactorize(DEV.array(2 * values))
    np.testing.assert_allclose(2 * factors.solve(DEV.array(b)).numpy(), x)
    with pytest.raises(BadRequest, match=rf"values: .*expected f64\[4, {a.nnz}\], as in the matrix"):
        factors.refactorize(DEV.array(values[1:]))
    values[2] = 0
    with pytest.raises(LinAlgError, match=r"singular.* of matrix \[2\]") as caught:
        factors.refactorize(DEV.array(values))
    assert caught.value.statuses == {(2,): -1}
    np.testing.assert_allclose(2 * factors.solve(DEV.array(b)).numpy(), x, err_msg="the factors of before stay")
    found, info = S.spsolve(a, DEV.array(b), values=DEV.array(values), check=False)
    assert info.numpy().tolist() == [0, 0, -1, 0]
    assert np.isnan(found.numpy()[2]).all()
    np.testing.assert_allclose(np.delete(found.numpy(), 2, 0), np.delete(x, 2, 0))


def test_a_batch_whose_operands_do_not_fit_the_pattern_is_refused_in_the_function(batch):
    dense, a, values = batch
    b = DEV.array(np.ones((BATCH, N)))
    for given, words in (
        ((a, values[:, 1:]), rf"values: .*expected f64\[batch, {a.nnz}\]"),
        ((a, values[0]), r"values: got f64\[\d+\]"),
        ((a, values.astype("f4")), "values: got f32"),
        ((a.T, values), "A: got .*CSC.*expected a matrix in CSR.*tocsr"),
        ((sp.coo_array(dense[0]), values), "A: got .*COO.*expected a matrix in CSR"),
    ):
        for call in (lambda m, v: S.spsolve(m, b, values=v), lambda m, v: S.splu(m, values=v)):
            with pytest.raises(BadRequest, match=words):
                call(given[0], DEV.array(given[1]))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_batch_of_torchs_tensors_gives_torchs(rng, batch):
    torch = pytest.importorskip("torch")
    dense, _, values = batch
    pattern = torch.from_numpy(dense[0]).to_sparse_csr()
    b = torch.from_numpy(rng.standard_normal((BATCH, N)))
    x = S.spsolve(pattern, b, values=torch.from_numpy(values))
    assert isinstance(x, torch.Tensor)
    np.testing.assert_allclose(torch.from_numpy(dense) @ x[..., None], b[..., None])
    factors = S.splu(pattern, values=torch.from_numpy(values))
    np.testing.assert_allclose(factors.solve(b), x)
    apart = torch.from_numpy(values.T.copy()).T
    with pytest.raises(BadRequest, match=r"values: .*strides.*expected dense memory"):
        S.spsolve(pattern, b, values=apart)
    np.testing.assert_allclose(S.splu(pattern, values=apart).solve(b), x, err_msg="of a copy, which is dense")
    values[1] = 0
    with pytest.raises(LinAlgError, match=r"of matrix \[1\]"):
        S.spsolve(pattern, b, values=torch.from_numpy(values))


def test_choices_change_no_solution_on_the_host(rng, batch):
    dense, a, _ = batch
    b = rng.standard_normal(N)
    for choices in ({"memory": "hybrid"}, {"memory": "hybrid", "device_memory": 1 << 20}, {"refinements": 2}):
        np.testing.assert_allclose(dense[0] @ S.spsolve(a, DEV.array(b), **choices).numpy(), b)
        np.testing.assert_allclose(dense[0] @ S.splu(a, **choices).solve(DEV.array(b)).numpy(), b)


# -- what has failed before -------------------------------------------------------------------------------------------
def test_a_matrix_is_factorized_whatever_another_one_before_it_was(executor):
    """The library tells a failure of all that comes after it, and takes scales over: no call is told of another's."""
    a = S.sparse_tensor(sp.eye_array(3, format="csr") * 2.0).fixed()
    good, bad, b = np.array([2.0, 2, 2]), np.array([2.0, -2, 2]), np.array([2.0, 4, 6])
    request = dp.SpsolveRequest(DEV.array(good), *a.parts[1:], DEV.array(b), assume_a="pos")
    plan = made(request, executor)
    for values in (good, bad, good, good, bad, bad, good):
        request.values.copy_from(values)
        x, info = (found.numpy() for found in enqueued(plan, request))
        assert (info.item() > 0) == (values is bad)
        if values is good:
            np.testing.assert_allclose(x, b / 2)
    phases = executor.library.phases
    assert phases.count(ANALYSIS) == 1 + 3, "once, and behind each that has failed"
    assert phases.count(REFACTORIZATION) == 3, "behind each that has not"


@pytest.mark.parametrize("is_complex", [False, True])
def test_what_is_no_number_in_b_is_no_failure(is_complex, executor, batch, rng):
    dense, a, values = batch
    kind = "c16" if is_complex else "f8"
    b = rng.standard_normal((BATCH, N)).astype(kind)
    b[1, 3] = np.inf
    request = request_of(a, values.astype(kind), b)
    x, info = (found.numpy() for found in enqueued(made(request, executor), request))
    assert not info.any()
    np.testing.assert_allclose((dense[0] @ x[0]), b[0])


@pytest.mark.parametrize("kind", ["f4", "f8", "c8", "c16"])
def test_the_kernel_that_looks_at_solutions(kind, rng, tmp_path):
    each, count = 37, 20
    parts = 1 + (kind[0] == "c")
    b, x = (
        rng.standard_normal((count, each * parts)).astype("f8" if kind in ("f8", "c16") else "f4") for _ in range(2)
    )
    b[3, 5], b[4, -1], x[4, 0], x[7, -1], x[9, 1], x[10, 0] = (
        np.nan,
        np.inf,
        np.nan,
        -np.inf,
        np.nan,
        np.finfo(x.dtype).max,
    )
    blocks = module_at("ops/blocks_on_cpu")
    chosen = batched.options(np.dtype(kind).itemsize, parts=parts)
    parameters = ("const REAL* b", "const REAL* x", "unsigned* found", "Int each", "Int count")
    source = "static void atomicOr(unsigned* at, unsigned x) { *at |= x; }\n" + batched.SOURCE
    for grid in (1, 3):
        found = np.zeros(count, np.uint32)
        given = [
            *(ctypes.c_void_p(one.ctypes.data) for one in (b, x, found)),
            *map(ctypes.c_int64, (each * parts, x.size)),
        ]
        blocks.InBlocks(tmp_path).launched(source, batched.NAME, chosen, parameters, (grid, 64), given)
        assert found.tolist() == [0, 0, 0, 2, 3, 0, 0, 1, 0, 1, *[0] * 10]
    kernel = Kernel(batched.SOURCE, batched.NAME, lambda _: None, chosen)
    assert blocks.kernels_on_cpu.size_for_sm_90(kernel) > 0
