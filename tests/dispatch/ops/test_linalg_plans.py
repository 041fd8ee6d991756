"""The plans that call cuSOLVER, over a stand-in for it: every case of every row, so that layouts are right anywhere."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest
from dispatch.keys import HOST, Arch
from dispatch.ops import FAMILIES
from dispatch.ops.linalg.cases import cases
from dispatch.table.select import candidates, select


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = loaded("cusolver_stand_in")
spectral = loaded("cusolver_spectral_stand_in")
symmetric = loaded("cusolver_symmetric_stand_in")
refined = loaded("cusolver_refined_stand_in")
products = loaded("cublas_linalg_stand_in")
exponentials = loaded("cusolver_exponential_stand_in")

# Those of this library's own kernels are in test_linalg_small.py.
ROWS = [row for row in dp.TABLE if row.op in FAMILIES["linalg"][1] and row.min_arch != HOST and row.library != "own"]


@pytest.fixture
def executor(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr("dispatch.ops.linalg.cusolver_jacobi.Settings", stand_in.Settings)
    made = stand_in.executor_of(monkeypatch)
    made.batched = products.install(monkeypatch, stand_in)
    spectral.install(monkeypatch, stand_in)
    symmetric.install(stand_in)
    refined.install(monkeypatch, stand_in)
    exponentials.install(products)
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
    request = dp.SolveRequest(a, dev.array(rng.standard_normal((10_000, 4, 1)), "f32"), library="cublas")
    row = select(request, Arch(90))
    plan, outputs = row.call(request, executor, row), dev.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    assert executor.batched.called == ["cublasSgetrfBatched", "cublasSgetrsBatched"]
    x, info = request.result(outputs)
    assert not info.numpy().any()
    np.testing.assert_allclose(np.asarray(a) @ x.numpy(), np.asarray(request.b), atol=1e-3)


def of_another(request):
    """The row that is asked first of those behind this library's own."""
    return next(row for row in candidates(request, Arch(90)) if row.library != "own")


@pytest.mark.parametrize(
    ("shape", "library"),
    [((10, 32, 32), "cublas"), ((10, 129, 129), "cusolverDn"), ((1, 32, 32), "cusolverDn"), ((32, 32), "cusolverDn")],
)
def test_many_small_matrices_go_to_cublas_and_others_to_cusolver_where_none_is_this_library_s(shape, library):
    a = dp.device("host").zeros(shape)
    for request in (dp.LuFactorRequest(a), dp.SolveRequest(a, a), dp.QrRequest(a), dp.ChoSolveRequest(a, a)):
        assert of_another(request).library == library
    oblong = dp.device("host").zeros((4, 6, 5))
    assert select(dp.LuFactorRequest(oblong), Arch(90)).library == "cusolverDn"
    assert select(dp.QrRequest(oblong), Arch(90)).library == "cublas"


@pytest.mark.parametrize(
    ("n", "called"), [(32, ["cublasDmatinvBatched"]), (33, ["cublasDgetrfBatched", "cublasDgetriBatched"])]
)
@pytest.mark.parametrize("order", ["rows", "columns"])
def test_inverses_of_many_are_one_call_of_each_routine_and_singular_ones_are_nan(n, called, order, executor, rng):
    dev = dp.device("host")
    values = rng.standard_normal((5, n, n)) + n * np.eye(n)
    values[3, :, 1] = 0
    a = dev.array(values) if order == "rows" else dev.array(values.mT).mT
    request = dp.InvRequest(a, library="cublas")
    row = select(request, Arch(90))
    plan, outputs = row.call(request, executor, row), dev.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    assert executor.batched.called == called
    out, info = request.result(outputs)
    assert info.numpy().tolist() == [0, 0, 0, 2, 0]
    assert np.isnan(out.numpy()[3]).all()
    good = [0, 1, 2, 4]
    np.testing.assert_allclose(values[good] @ out.numpy()[good], np.broadcast_to(np.eye(n), (4, n, n)), atol=1e-12)
    np.testing.assert_array_equal(a.numpy(), values)


def test_least_squares_of_many_are_one_call_and_one_without_full_rank_is_nan(executor, rng):
    dev = dp.device("host")
    a, b = rng.standard_normal((4, 9, 3)), rng.standard_normal((4, 9, 2))
    a[2, :, 0] = 0
    request = dp.LstsqRequest(dev.array(a), dev.array(b), driver="gels")
    row = select(request, Arch(90))
    plan, outputs = row.call(request, executor, row), dev.executor().outputs(request)
    plan.enqueue(request.arguments(outputs))
    assert executor.batched.called == ["cublasDgelsBatched"]
    x, residuals, info = (tensor.numpy() for tensor in request.result(outputs))
    assert info.tolist() == [0, 0, 1, 0]
    assert np.isnan(x[2]).all()
    assert np.isnan(residuals[2]).all()
    for number in (0, 1, 3):
        exact, squares, *_ = np.linalg.lstsq(a[number], b[number])
        np.testing.assert_allclose(x[number], exact, atol=1e-12)
        np.testing.assert_allclose(residuals[number], squares, atol=1e-12)


@pytest.mark.parametrize(
    ("request_of", "library"),
    [
        (dp.InvRequest, "cublas"),
        (lambda a: dp.InvRequest(a, assume_a="pos"), "cusolverDn"),
        (lambda a: dp.InvRequest(a, assume_a="lower"), "cusolverDn"),
        (lambda a: dp.InvRequest(a[0]), "cusolverDn"),
        (lambda a: dp.LstsqRequest(a, a, driver="gels"), "cublas"),
        (lambda a: dp.LstsqRequest(a, a), "cusolverDn"),
        (lambda a: dp.LstsqRequest(a[:, :7], a[:, :7], driver="gels"), "cusolverDn"),
    ],
    ids=["inv", "positive", "triangle", "one", "lstsq", "of any rank", "wide"],
)
def test_what_cublas_has_no_batched_routine_for_goes_to_cusolver(request_of, library):
    assert of_another(request_of(dp.device("host").zeros((6, 8, 8)))).library == library


@pytest.mark.parametrize("op", ["eigh", "generalized_eigh", "svd"])
def test_the_rows_that_race_call_each_their_own_routine(op, executor, monkeypatch, rng):
    kind = {"eigh": dp.EighRequest, "generalized_eigh": dp.GeneralizedEighRequest, "svd": dp.SvdRequest}[op]
    dev, a = dp.device("host"), rng.standard_normal((6, 6))
    a = dev.array(a @ a.T + np.eye(6))
    request = kind(*([a, a] if op == "generalized_eigh" else [a]), autotune=True)
    called, unchecked = [], stand_in.Routine.unchecked

    def noted(self, *given):
        called.append(f"cusolverDn{self.name}")
        return unchecked(self, *given)

    monkeypatch.setattr(stand_in.Routine, "unchecked", noted)
    rows = list(candidates(request, Arch(90)))
    for row in rows:
        outputs = dev.executor().outputs(request)
        row.call(request, executor, row).enqueue(request.arguments(outputs))
        assert not outputs["info"].numpy()
    assert called == [row.function for row in rows]
    assert len(called) == (3 if op == "svd" else 2)


@pytest.mark.parametrize("compute_uv", [True, False])
@pytest.mark.parametrize("shape", [(3, 9, 5), (3, 5, 9), (6, 6)], ids=str)
def test_what_the_polar_decomposition_has_perturbed_is_decomposed_once_more(
    shape, compute_uv, executor, monkeypatch, rng
):
    """cuSOLVER says so beside the status alone, which is 0."""
    calls, real = [], stand_in.X["Xgesvd"]
    monkeypatch.setitem(stand_in.X, "Xgesvd", lambda *given: (calls.append(1), real(*given)))
    dev = dp.device("host")
    regular, singular = rng.standard_normal(shape), rng.standard_normal(shape)
    singular[(-1,) * (len(shape) - 2)] = 1  # of a batch the last
    a = dev.array(regular)
    request = dp.SvdRequest(a, driver="gesvdp", compute_uv=compute_uv, full_matrices=False)
    row = select(request, Arch(90))
    plan = row.call(request, executor, row)
    for values, expected in ((regular, 0), (singular, len(singular) if singular.ndim > 2 else 1), (regular, 0)):
        a.copy_from(values)
        calls.clear()
        outputs = request.device.executor().outputs(request)
        plan.enqueue(request.arguments(outputs))
        found = dict(zip(request.outputs(), request.result(outputs), strict=True))
        assert len(calls) == expected
        np.testing.assert_allclose(found["s"].numpy(), np.linalg.svd(values, compute_uv=False), atol=1e-12)
        if compute_uv:
            u, s, vh = (found[name].numpy() for name in ("u", "s", "vh"))
            np.testing.assert_allclose(u * s[..., None, :] @ vh, values, atol=1e-12)


@pytest.mark.parametrize("failing", [None, 0, 1], ids=["", "of A", "of its adjoint"])
@pytest.mark.parametrize("dtype", ["f64", "c64"])
def test_left_eigenvectors_are_a_second_call_whose_status_counts_too(dtype, failing, executor, monkeypatch, rng):
    calls, real = [], stand_in.X["Xgeev"]

    def geev(*given):
        real(*given)
        stand_in.put_info(given[-1], 3 if len(calls) == failing else 0)
        calls.append(given)

    monkeypatch.setitem(stand_in.X, "Xgeev", geev)
    dev, a = dp.device("host"), rng.standard_normal((6, 6))
    a = a + 1j * rng.standard_normal((6, 6)) if dtype == "c64" else a
    request = dp.EigRequest(dev.array(a, dtype), left=True)
    row = select(request, Arch(90))
    outputs = dev.executor().outputs(request)
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    w, u, v, info = (tensor.numpy() for tensor in request.result(outputs))
    assert len(calls) == 2
    if failing is not None:
        assert info == 3
        assert all(np.isnan(one).all() for one in (w, u, v))
        return
    assert info == 0
    np.testing.assert_allclose(u.conj().T @ a, w[:, None] * u.conj().T, atol=1e-4)
    np.testing.assert_allclose(a @ v, v * w, atol=1e-4)


def test_a_capture_is_refused_before_geev_is_asked_for_its_workspace(executor, monkeypatch, rng):
    """To ask ends the caller's capture: seen on an H200 with cuSOLVER 12.0."""

    def refuse(what, *, always):
        raise BadRequest("stream", "a stream under capture", f"no capture for {what}" if always else "")

    executor.refuse_capture = refuse
    monkeypatch.setitem(stand_in.X, "Xgeev", None)
    request = dp.EigRequest(dp.device("host").array(rng.standard_normal((6, 6))))
    row = select(request, Arch(90))
    with pytest.raises(BadRequest, match="capture; expected no capture for geev"):
        row.call(request, executor, row)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_of_many_matrices_those_that_are_not_finite_have_a_status_and_the_others_their_eigenvalues(
    dtype, left, executor, rng
):
    dev, a = dp.device("host"), rng.standard_normal((4, 5, 5)).astype(dtype[0] + ("4" if dtype == "f32" else "16"))
    a[1, 2, 3], a[3, 0, 0] = np.nan, np.inf
    if dtype == "c128":
        a[3, 0, 0] = complex(1, -np.inf)
    request = dp.EigRequest(dev.array(a), left=left)
    row = select(request, Arch(90))
    outputs = dev.executor().outputs(request)
    plan = row.call(request, executor, row)
    for _ in range(2):  # the second finds what the first has left in scratch memory
        plan.enqueue(request.arguments(outputs))
        w, *vectors, info = (tensor.numpy() for tensor in request.result(outputs))
        assert info.tolist() == [0, 1, 0, 1]
        for each in (w, *vectors):
            assert np.isnan(each[1::2]).all()
            assert np.isfinite(each[::2]).all()
        np.testing.assert_allclose(a[::2] @ vectors[-1][::2], vectors[-1][::2] * w[::2, None], atol=1e-4)
    np.testing.assert_array_equal(request.a.numpy(), a)


@pytest.mark.parametrize("dtype", ["f64", "c64"])
@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        (dp.LuFactorRequest, {}),
        (dp.LuFactorRequest, {"shape": (3, 5, 9)}),
        (dp.LuFactorRequest, {"shape": (3, 9, 5)}),
        (dp.SolveRequest, {"b": (3, 5, 2)}),
        (dp.SolveRequest, {"b": (3, 5, 2), "assume_a": "sym", "lower": True}),
        (dp.InvRequest, {}),
        (dp.LdlRequest, {"hermitian": False}),
        (dp.LdlRequest, {"hermitian": False, "expand": True}),
        (dp.DetRequest, {}),
        (dp.SlogdetRequest, {}),
        *((dp.QrRequest, {"mode": mode, "shape": (3, 9, 5)}) for mode in dp.QrMode),
        (dp.QrMultiplyRequest, {"c": (3, 2, 5)}),
        (dp.LstsqRequest, {"b": (3, 9, 2), "shape": (3, 9, 5), "driver": "gels"}),
        (dp.LstsqRequest, {"b": (3, 5, 2), "shape": (3, 5, 9), "driver": "gels"}),
        (dp.RefinedSolveRequest, {"b": (3, 5, 2)}),
        (dp.RefinedLstsqRequest, {"b": (3, 5, 2)}),
        (dp.RandomizedSvdRequest, {"rank": 1}),
        (dp.SvdRequest, {"driver": "gesvda", "full_matrices": False}),
        (dp.SvdRequest, {"driver": "gesvdj"}),
        (dp.SvdRequest, {"driver": "gesvdj", "shape": (3, 40, 5), "full_matrices": False}),
        (dp.SvdRequest, {"driver": "gesvdp", "shape": (3, 9, 5)}),
        (dp.SvdRequest, {"driver": "gesvdp", "compute_uv": False}),
        (dp.EighRequest, {"driver": "syevj"}),
        (dp.EighRequest, {"driver": "syevj", "eigvals_only": True}),
    ],
    ids=lambda one: one.op if hasattr(one, "op") else "-".join(map(str, one.values())),
)
def test_what_the_routine_gives_for_nan_is_nan_where_it_would_not_say_so(
    kind, choices, dtype, executor, monkeypatch, rng
):
    """cuSOLVER 12.0 gave finite numbers and a status of 0, or an error for all of a batch."""
    monkeypatch.setattr(symmetric, "takes_nan", True)
    dev, a = dp.device("host"), rng.standard_normal(choices.get("shape", (3, 5, 5)))
    a[1, 3, 2] = np.nan
    choices = {
        name: dev.array(rng.standard_normal(choice), dtype) if name in ("b", "c") else choice
        for name, choice in choices.items()
        if name != "shape"
    }
    request = kind(dev.array(a, dtype), **choices)
    row = next(row for row in candidates(request, Arch(90)) if row.library == "cusolverDn")
    outputs = dev.executor().outputs(request)
    plan = row.call(request, executor, row)
    for _ in range(2):
        plan.enqueue(request.arguments(outputs))
        for tensor in outputs.values():
            if tensor.size and tensor.dtype.name in ("f32", "f64", "c64", "c128"):
                broken = np.isnan(tensor.numpy()).reshape(3, -1).any(axis=1)
                assert broken.tolist() == [False, True, False]


@pytest.mark.parametrize("kind", [dp.LdlRequest, dp.SolveRequest])
@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_a_singular_symmetric_matrix_is_told_where_the_routine_does_not(kind, dtype, executor, rng):
    """Of a first column of zeros `sytrf` of cuSOLVER 12.0 told nothing."""
    dev, a = dp.device("host"), rng.standard_normal((3, 4, 4))
    a[1, 0] = a[1, :, 0] = a[2, 3] = a[2, :, 3] = 0
    a = dev.array(a + a.mT, dtype)
    is_ldl = kind is dp.LdlRequest
    request = kind(a, hermitian=False) if is_ldl else kind(a, dev.array(np.ones((3, 4, 2)), dtype), assume_a="sym")
    row = next(row for row in candidates(request, Arch(90)) if row.library == "cusolverDn")
    outputs = dev.executor().outputs(request)
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    assert (outputs["info"].numpy() > 0).tolist() == [False, True, True]
    assert is_ldl or np.isnan(outputs["out"].numpy()).all(axis=(1, 2)).tolist() == [False, True, True]


@pytest.mark.parametrize("dtype", ["f32", "c128"])
def test_pairs_of_many_are_one_call_that_autotune_alone_asks_for(dtype, executor, monkeypatch, rng):
    calls, real = [], stand_in.X["XsygvStridedBatched"]
    monkeypatch.setitem(stand_in.X, "XsygvStridedBatched", lambda *given: (calls.append(1), real(*given)))
    dev = dp.device("host")
    a, b = (rng.standard_normal((5, 4, 4)) for _ in range(2))
    a, b = a + a.mT, b @ b.mT + np.eye(4)
    b[2, 1, 1] = -9
    request = dp.GeneralizedEighRequest(dev.array(a, dtype), dev.array(b, dtype), autotune=True)
    first, *_, last = candidates(request, Arch(90))
    assert (first.variant, last.variant) == ("", "of many")
    assert first is select(request.replace(), Arch(90))
    outputs = dev.executor().outputs(request)
    last.call(request, executor, last).enqueue(request.arguments(outputs))
    assert calls == [1]
    w, v, info = (tensor.numpy() for tensor in request.result(outputs))
    assert info.tolist() == [0, 0, 6, 0, 0]
    assert np.isnan(w[2]).all()
    good = [0, 1, 3, 4]
    np.testing.assert_allclose(a[good] @ v[good], b[good] @ v[good] * w[good][:, None], atol=1e-4)


@pytest.mark.parametrize("sides", [(), (1,), (3,)], ids=["a vector", "one", "three"])
@pytest.mark.parametrize("shape", [(22, 2), (64, 32), (3, 1), (8, 8)], ids=str)
def test_gmres_is_the_default_of_one_right_side_and_as_many_rows_as_columns(shape, sides, executor, monkeypatch, rng):
    """cuSOLVER 12.0's IRSXgels says CUSOLVER_STATUS_IRS_NOT_SUPPORTED of GMRES with more rows than columns."""
    methods, real = [], stand_in.PLAIN["IRSXgels"]

    def gels(params, *given):
        methods.append(params.choices["RefinementSolver"].name.removeprefix("CUSOLVER_IRS_REFINE_"))
        real(params, *given)

    monkeypatch.setitem(stand_in.PLAIN, "IRSXgels", gels)
    dev = dp.device("host")
    request = dp.RefinedLstsqRequest(dev.array(rng.random(shape)), dev.array(rng.random((shape[0], *sides))))
    row, outputs = select(request, Arch(90)), dev.executor().outputs(request)
    row.call(request, executor, row).enqueue(request.arguments(outputs))
    assert methods == ["GMRES" if shape == (8, 8) and sides != (3,) else "CLASSICAL"]
    expected = np.linalg.lstsq(np.asarray(request.a), np.asarray(request.b))[0]
    np.testing.assert_allclose(request.result(outputs)[0].numpy(), expected, atol=1e-9)
