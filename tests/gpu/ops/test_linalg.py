"""Linear algebra on the GPU: every row through its cases, matrices of more tiles, statuses, and torch's tensors."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import LinAlgError
from dispatch.execute import installed
from dispatch.keys import C64, C128, F32, F64, HOST
from dispatch.ops import FAMILIES
from dispatch.ops.linalg.cases import F, cases, check, chosen

OPS = FAMILIES["linalg"][1]
RACED = "cusolverDnXsygvStridedBatched"  # which autotune alone asks for
ROWS = [row for row in dp.TABLE if row.op in OPS and row.min_arch != HOST and row.function != RACED]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
DTYPES = (F32, F64, C64, C128)
LARGE = (F("random", (515, 515)), F("random", (515, 515), "columns", "columns"), F("random", (40, 31, 31)))
OBLONG = (F("random", (700, 300)), F("random", (300, 700), "columns"), F("random", (5, 40, 70), "strided", "rows"))
HALVES = (*chosen(LARGE, "lower", True), *chosen(LARGE, "lower", False))
SOME = (
    *chosen(HALVES, "subset_by_index", (0, 7), (3, 30)),
    *chosen(HALVES, "subset_by_value", "inner", "above", "below"),
)
LARGER = {
    "cholesky": HALVES,
    "cho_solve": (*HALVES, *(form._replace(right=1) for form in HALVES)),
    "lu_factor": (*LARGE, F("random", (700, 300)), F("random", (300, 700))),
    "lu_solve": chosen(LARGE, "trans", 0, 1, 2),
    "solve": (*LARGE, *chosen(HALVES, "assume_a", dp.MatrixKind.POS), *chosen(HALVES, "assume_a", dp.MatrixKind.SYM)),
    "qr": chosen((*LARGE, F("random", (700, 300)), F("random", (300, 700)), *LARGE), "mode", *dp.QrMode),
    "ldl": chosen((*HALVES, *chosen(HALVES, "expand", True)), "hermitian", False),
    "ldl_solve": chosen((*HALVES, *(form._replace(right=0) for form in HALVES[:2])), "hermitian", False),
    "qr_multiply": tuple(form for side in dp.QrSide for form in chosen((*LARGE, *OBLONG), "mode", side)),
    "orgqr": (*LARGE, *OBLONG, F("random", (700, 300), columns=700)),
    "ormqr": tuple(
        form
        for adjoint in (False, True)
        for side in dp.QrSide
        for form in chosen(chosen((*LARGE, *OBLONG), "side", side), "adjoint", adjoint)
    ),
    "eigh": (*HALVES, *chosen(HALVES, "driver", dp.EighDriver.SYEVJ), *SOME),
    "generalized_eigh": chosen((*HALVES, *chosen(HALVES, "driver", dp.EighDriver.SYEVJ), *SOME), "itype", 1, 2, 3),
    "eig": (*LARGE, F("random", (40, 31, 31), eigvals_only=True), *chosen(LARGE, "left", True)),
    "refined_solve": (
        F("even", (515, 515)),
        F("even", (515, 515), "columns", "columns"),
        F("even", (515, 515), right=0),
    ),
    "refined_lstsq": (
        *(F("random", (700, 300)), F("random", (700, 300), "columns", "rows")),
        *(F("random", (700, 300), right=right) for right in (0, 1)),
    ),
    "randomized_svd": chosen((F("rank 3", (515, 300)), F("rank 3", (300, 515), "columns")), "rank", 3),
    "inv": (*LARGE, *chosen(HALVES, "assume_a", dp.InverseKind.POS)),
    "det": LARGE[2:],
    "slogdet": LARGE,
    "matrix_norm": tuple(form for order in dp.NormOrder for form in chosen(OBLONG, "order", order)),
    "matrix_rank": OBLONG,
    "pinv": (*LARGE, *OBLONG),
    "polar": tuple(form for side in dp.QrSide for form in chosen((*LARGE, *OBLONG), "side", side)),
    "lstsq": tuple(form for driver in dp.LstsqDriver for form in chosen((*LARGE, *OBLONG), "driver", driver)),
    "expm": (F("even", (515, 515)), F("skew", (3, 300, 300), "columns", "rows"), F("even", (40, 31, 31))),
    "svd": (
        *(
            form
            for driver in (dp.SvdDriver.GESVD, dp.SvdDriver.GESVDJ, dp.SvdDriver.GESVDP)
            for form in chosen((*LARGE, F("random", (300, 120)), F("random", (120, 300))), "driver", driver)
        ),
        F("random", (1000, 90, 24), driver=dp.SvdDriver.GESVDA, full_matrices=False),
        F("random", (20, 2000), "rows", driver=dp.SvdDriver.GESVDA, full_matrices=False),
    ),
}
LARGER_CASES = [
    pytest.param(op, dtype, form, id=f"{op}-{dtype}-{n}")
    for op in OPS
    for dtype in DTYPES
    for n, form in enumerate(LARGER[op])
]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("row", [row for row in dp.TABLE if row.function == RACED], ids=lambda row: row.name)
def test_a_row_that_only_races_is_right(row, gpu, rng, skip_without):
    skip_without(row)
    for case in cases(row):
        one = case.check(gpu, rng)
        if not any(rule(one.request) for rule in row.rules):
            outputs = gpu.executor().outputs(one.request)
            row.call(one.request, gpu.executor(), row).enqueue(one.request.arguments(outputs))
            one.verify(one.request.result(outputs))


@pytest.mark.parametrize(("op", "dtype", "form"), LARGER_CASES)
def test_a_larger_matrix_has_small_residuals(op, dtype, form, gpu, rng):
    one = check(op, dtype, form, "larger", gpu, rng)
    one.verify(dp.run(one.request))


def test_a_batch_tells_which_matrix_is_not_positive_definite_and_nothing_waits(gpu, rng):
    a = rng.standard_normal((5, 8, 8))
    a = a @ a.mT + np.eye(8)
    a[3, 4, 4] = -100
    out, info = dp.cholesky(gpu.array(a))
    assert info.numpy().tolist() == [0, 0, 0, 5, 0]
    assert np.isnan(out.numpy()[3]).all()
    assert np.isfinite(out.numpy()[[0, 1, 2, 4]]).all()
    with pytest.raises(LinAlgError, match=r"cholesky: the leading minor of order 5 .* of matrix \[3\]") as caught:
        dp.linalg.cholesky(gpu.array(a))
    assert caught.value.statuses == {(3,): 5}


def test_a_singular_matrix_is_an_error_or_nan(gpu):
    a, b = gpu.array(np.diag([1.0, 2.0, 0.0, 3.0])), gpu.array(np.ones(4))
    with pytest.raises(LinAlgError, match=r"solve: the matrix is singular: U\[2, 2\]"):
        dp.linalg.solve(a, b)
    x, info = dp.linalg.solve(a, b, check=False)
    assert info.numpy() == 3
    assert np.isnan(x.numpy()).all()


@pytest.mark.parametrize("op", ["cholesky", "lu_factor", "qr"])
def test_many_calls_at_other_addresses_stay_right(op, gpu, rng):
    """Long enough for the plan to be learnt, and launched as a graph."""
    request = {"cholesky": dp.CholeskyRequest, "lu_factor": dp.LuFactorRequest, "qr": dp.QrRequest}[op]
    kept = []
    for _ in range(200):
        a = rng.standard_normal((24, 24))
        a = a @ a.T + np.eye(24)
        kept.append((a, dp.run(request(gpu.array(a)))))
    for a, found in kept:
        first, second = (tensor.numpy() for tensor in found[:2])
        if op == "cholesky":
            made = first @ first.T
        elif op == "qr":
            made = first @ second
        else:
            made = np.tril(first, -1) @ np.triu(first) + np.triu(first)
            order = np.arange(24)
            for place, pivot in enumerate(second):
                order[[place, pivot - 1]] = order[[pivot - 1, place]]
            a = a[order]  # noqa: PLW2901
        np.testing.assert_allclose(made, a, atol=1e-11)


def test_torch_tensors_come_and_go(rng):
    torch = pytest.importorskip("torch")
    a = torch.tensor(rng.standard_normal((3, 9, 9)), device="cuda")
    b = torch.tensor(rng.standard_normal((3, 9, 2)), device="cuda")
    torch.testing.assert_close(dp.linalg.solve(a, b), torch.linalg.solve(a, b), rtol=1e-9, atol=1e-9)
    p = a @ a.mT + torch.eye(9, device="cuda", dtype=a.dtype)
    torch.testing.assert_close(dp.linalg.cholesky(p, lower=True), torch.linalg.cholesky(p), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dp.linalg.eigvalsh(p), torch.linalg.eigvalsh(p), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dp.linalg.svdvals(a), torch.linalg.svdvals(a), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(dp.linalg.inv(a), torch.linalg.inv(a), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", [(100, 24, 24), (300, 200)])
def test_autotune_finds_the_faster_driver_once_and_explain_says_which(shape, gpu, rng, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path))
    installed.algorithms.cache_clear()
    a = rng.standard_normal(shape)
    request = dp.SvdRequest(gpu.array(a), full_matrices=False, autotune=True)
    u, s, vh, info = dp.run(request)
    assert not info.numpy().any()
    np.testing.assert_allclose((u.numpy() * s.numpy()[..., None, :]) @ vh.numpy(), a, atol=1e-11)
    of_doubles = [row for row in dp.TABLE.of("svd") if row.dtypes[0] is F64 and row.on(gpu.arch)]
    takers = [row for row in of_doubles if not any(rule(request) for rule in row.rules)]
    assert f"was the fastest of {len(takers)} rows" in str(dp.explain(request))
    assert len(list(tmp_path.glob("autotune-*.json"))) == 1
    installed.algorithms.cache_clear()
