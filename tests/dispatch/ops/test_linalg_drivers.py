"""Which rows take a request that names a driver or none, which of them race, and what `explain` says of that."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, LinAlgError, NoRow
from dispatch.keys import HOST, Arch
from dispatch.ops.linalg.drivers import DRIVERS, driver_of
from dispatch.ops.linalg.spectral import EighDriver, SvdDriver
from dispatch.table.select import candidates, explain, select

H100 = Arch(90)


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


def functions(request, arch=H100):
    return [row.function.removeprefix("cusolverDn") for row in candidates(request, arch)]


def test_an_open_driver_is_the_first_one_and_with_autotune_all_that_are_as_exact(dev):
    a = dev.zeros((40, 40), "f64")
    assert functions(dp.SvdRequest(a)) == ["Xgesvd"]
    assert functions(dp.SvdRequest(a, autotune=True)) == ["Xgesvd", "Dgesvdj", "Xgesvdp"]
    assert functions(dp.SvdRequest(dev.zeros((9, 32, 20), "f64"))) == ["Dgesvdj"]  # all in one call
    assert functions(dp.SvdRequest(dev.zeros((9, 33, 20), "f64"))) == ["Xgesvd"]
    assert functions(dp.SvdRequest(dev.zeros((1, 32, 20), "f64"))) == ["Xgesvd"]
    assert functions(dp.EighRequest(a, autotune=True)) == ["Xsyevd", "Dsyevj"]
    assert functions(dp.EighRequest(a.astype("c64"), autotune=True)) == ["Xsyevd", "Cheevj"]
    pair = dp.GeneralizedEighRequest(a, a, autotune=True)
    assert functions(pair) == ["Dsygvd", "Dsygvj"]
    assert functions(dp.EighRequest(a, autotune=True, subset_by_index=(0, 3))) == ["Xsyevd"]
    many = dev.zeros((9, 8, 8))
    assert functions(dp.QrRequest(many, autotune=True)) == ["cublasSgeqrfBatched", "Xgeqrf"]
    assert functions(dp.SolveRequest(many, many, autotune=True)) == ["solve", "cublasSgetrsBatched", "Xgetrf"]
    assert len(functions(dp.InvRequest(many, autotune=True))) == 4
    assert len(functions(dp.LstsqRequest(many, many, driver="gels", autotune=True))) == 2


@pytest.mark.parametrize("op", DRIVERS)
def test_a_driver_that_is_named_is_its_row_alone_on_a_gpu_and_on_the_host(op, dev):
    a = dev.zeros((6, 6))
    given = (a, a) if op == "generalized_eigh" else (a,)
    kind = {"eigh": dp.EighRequest, "generalized_eigh": dp.GeneralizedEighRequest, "svd": dp.SvdRequest}[op]
    for driver in DRIVERS[op]:
        for arch in (H100, HOST):
            for autotune in (False, True):
                (row,) = candidates(kind(*given, driver=driver, autotune=autotune), arch)
                assert driver_of(row) is driver


def test_what_is_refused_says_which_driver_it_wants(dev):
    a = dev.zeros((6, 6))
    said = dict(explain(dp.SvdRequest(a, driver="gesvdp"), H100).refusals)
    assert str(said["svd f32→f32 sm_75 cusolverDn"][0]) == "needs driver gesvd, or none, has gesvdp"
    said = dict(explain(dp.SvdRequest(a, driver="gesvdj"), H100).refusals)
    assert "svd f32→f32 gesvdj sm_75 cusolverDn" not in said
    with pytest.raises(NoRow) as caught:
        dp.svd(dev.zeros((4, 3, 5, 5))[:, :2])
    why = dict(caught.value.tried)["svd f32→f32 gesvdp host scipy"]
    assert str(why[-1]) == "needs driver gesvdp, or none and autotune, has none"


def test_explain_says_that_rows_will_race(dev):
    told = explain(dp.SvdRequest(dev.zeros((6, 6)), autotune=True), H100)
    assert "3 rows take it; they are timed when it first runs" in str(told)
    assert not explain(dp.SvdRequest(dev.zeros((6, 6))), H100).tuned
    assert not explain(dp.SvdRequest(dev.zeros((6, 6)), autotune=True)).tuned  # on the host nothing is timed


def test_explain_says_which_row_has_won(dev, monkeypatch):
    request = dp.SvdRequest(dev.zeros((6, 6)), autotune=True)
    first, second, _ = candidates(request, H100)
    plan = type("Won", (), {"row": second, "relocation": None, "launch": None})()
    monkeypatch.setattr("dispatch.table.select._plan", lambda _: plan)
    monkeypatch.setattr(dev, "arch", H100)
    told = explain(request)
    assert told.row is second
    assert "was the fastest of 3 rows" in str(told)
    assert str(dict(told.refusals)[first.name][0]) == "takes it, but was not the fastest"


def test_the_functions_take_both(dev, rng):
    a = rng.standard_normal((5, 5))
    for driver in (None, *SvdDriver):
        np.testing.assert_allclose(
            dp.linalg.svdvals(dev.array(a), driver=driver, autotune=True).numpy(), np.linalg.svd(a)[1]
        )
    a = a + a.T
    for driver in (None, *EighDriver):
        w = dp.linalg.eigvalsh(dev.array(a), driver=driver, autotune=True)
        np.testing.assert_allclose(w.numpy(), np.linalg.eigvalsh(a), atol=1e-12)
    np.testing.assert_allclose(dp.linalg.solve(a, a, autotune=True), np.eye(5), atol=1e-9)


# -- iterative refinement ---------------------------------------------------------------------------------------------
def test_refined_solutions_are_numpys_and_say_how_many_steps_it_took(dev, rng):
    a, b = rng.standard_normal((2, 6, 6)), rng.standard_normal((2, 6, 3))
    x, iterations = dp.linalg.refined_solve(dev.array(a), dev.array(b), precision="bf16")
    np.testing.assert_allclose(x.numpy(), np.linalg.solve(a, b), atol=1e-9)
    assert iterations.numpy().tolist() == [0, 0]  # the host refines nothing
    tall, side = rng.standard_normal((9, 4)), rng.standard_normal(9)
    x, residuals, iterations = dp.linalg.refined_lstsq(dev.array(tall), dev.array(side))
    expected = np.linalg.lstsq(tall, side)
    np.testing.assert_allclose(x.numpy(), expected[0], atol=1e-12)
    np.testing.assert_allclose(residuals.numpy(), expected[1][0])
    assert iterations.shape == ()
    with pytest.raises(LinAlgError, match="refined_solve: the matrix is singular"):
        dp.linalg.refined_solve(dev.zeros((3, 3)), dev.zeros((3,)))


def test_gmres_of_more_rows_than_columns_is_refused_with_its_reason(dev):
    a, b, square = dev.zeros((22, 2)), dev.zeros((22, 1)), dev.zeros((22, 22))
    for refinement in (None, "classical"):
        assert functions(dp.RefinedLstsqRequest(a, b, refinement=refinement)) == ["IRSXgels"]
    assert functions(dp.RefinedLstsqRequest(square, b, refinement="gmres")) == ["IRSXgels"]
    assert functions(dp.RefinedSolveRequest(square, b, refinement="gmres")) == ["IRSXgesv"]
    with pytest.raises(NoRow, match="needs refinement=CLASSICAL or square matrices, has GMRES and 22 x 2"):
        select(dp.RefinedLstsqRequest(a, b, refinement="gmres"), H100)


UNREFINED = {
    "precision: got F32; expected a precision below that of f32": {"precision": "f32"},
    "refinement: got GMRES with 2 right-hand sides; expected one .*classical": {"refinement": "gmres"},
    "max_iterations: got 0": {"max_iterations": 0},
    "FactorPrecision: F32, TF32, BF16, F16": {"precision": "fp8"},
}


@pytest.mark.parametrize("said", UNREFINED)
def test_choices_that_refinement_has_not_are_refused(said, dev):
    for kind in (dp.RefinedSolveRequest, dp.RefinedLstsqRequest):
        with pytest.raises(BadRequest, match=said):
            kind(dev.zeros((4, 4)), dev.zeros((4, 2)), **UNREFINED[said])
    with pytest.raises(BadRequest, match="at least as many rows as columns"):
        dp.refined_lstsq(dev.zeros((3, 4)), dev.zeros((3, 2)))
