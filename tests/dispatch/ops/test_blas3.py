"""BLAS level 3 on the host against SciPy, and refusals."""

import numpy as np
import pytest
import scipy.linalg

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import Arch
from dispatch.table.select import select


@pytest.fixture
def dev():
    return dp.device("host")


# -- in SciPy's words -------------------------------------------------------------------------------------------------
def test_triangular_systems_are_those_of_solve_triangular(dev, rng):
    a, b = rng.standard_normal((6, 6)) + 4 * np.eye(6), rng.standard_normal((6, 3))
    for low, trans, unit in [(low, t, u) for low in (True, False) for t in "NTC" for u in (True, False)]:
        expected = scipy.linalg.solve_triangular(a, b, trans=trans, lower=low, unit_diagonal=unit)
        chosen = {"uplo": "lower" if low else "upper", "trans": trans, "diag": "unit" if unit else "non_unit"}
        np.testing.assert_allclose(dp.trsm(dev.array(a), dev.array(b), **chosen).numpy(), expected, rtol=1e-9)


def test_leading_axes_of_a_triangle_broadcast(dev, rng):
    a, b = rng.standard_normal((2, 1, 4, 4)) + 4 * np.eye(4), rng.standard_normal((2, 3, 4, 5))
    got = dp.trsm(dev.array(a), dev.array(b), uplo="upper").numpy()
    np.testing.assert_allclose(np.triu(a) @ got, b, rtol=1e-10, atol=1e-12)
    alone = dp.trsm(dev.array(a[1, 0]), dev.array(b), uplo="upper").numpy()
    np.testing.assert_allclose(np.triu(a[1, 0]) @ alone, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_a_rank_update_has_the_other_triangle_of_c_and_zeros_without(dtype, dev, rng):
    a, c = rng.standard_normal((4, 2)).astype(dtype), rng.standard_normal((4, 4)).astype(dtype)
    alone = dp.syrk(dev.array(a), uplo="upper").numpy()
    np.testing.assert_allclose(alone, np.triu(a @ a.T), rtol=1e-5)
    for beta in (0.0, 2.0):
        got = dp.syrk(dev.array(a), c=dev.array(c), beta=beta, uplo="upper").numpy()
        assert (got[np.tril_indices(4, -1)] == c[np.tril_indices(4, -1)]).all()
        np.testing.assert_allclose(np.triu(got), np.triu(a @ a.T + beta * c), rtol=1e-4, atol=1e-5)


def test_beta_is_1_where_there_is_a_c(dev):
    a, c = dev.array(np.eye(2)), dev.array(np.ones((2, 2)))
    assert dp.symm(a, a, c=c).numpy().tolist() == [[2, 1], [1, 2]]
    assert dp.SymmRequest(a, a, c=c).factor("beta") == 1
    assert dp.SymmRequest(a, a).factor("beta") == 0


def test_a_matrix_is_changed_in_place(dev, rng):
    a, b = rng.standard_normal((3, 3)), rng.standard_normal((3, 4))
    x = dev.array(b)
    assert dp.trmm(dev.array(a), x, out=x) is x
    np.testing.assert_allclose(x.numpy(), np.tril(a) @ b)
    assert dp.geam(x, x, alpha=2, beta=-1, out=x) is x
    np.testing.assert_allclose(x.numpy(), np.tril(a) @ b)


# -- what lies as cuBLAS does not take it -----------------------------------------------------------------------------
GPU = Arch(90)


def test_matrices_are_taken_as_they_lie(dev):
    whole = dev.zeros((12, 20))
    for view in (whole, whole.mT, whole[2:8, 3:11], whole[2:8, 3:11].mT, whole[:, :1], whole[:1], whole[3:4, ::2].mT):
        assert select(dp.SyrkRequest(view), GPU).function == "cublasSsyrk_v2"
    # fmt: off
    for request, reason in (
        (dp.SyrkRequest(whole[:, ::2]), "a row-major or column-major, with adjacent elements in each line"),
        (dp.SyrkRequest(whole[::-1]), "a row-major or column-major"),
        (dp.SymmRequest(whole[:, :12], whole, out=dev.zeros((20, 12)).mT), "needs b in the order of out"),
        (dp.HerkRequest(dev.zeros((4, 4), "c64"), out=dev.zeros((4, 4), "c64").mT), "needs a in the order of out"),
        (dp.Syr2kRequest(whole, dev.zeros((20, 12)).mT), "needs b in the order of a"),
        (dp.DgmmRequest(whole, dev.zeros((12,))[::-1]), "x with a stride above 0"),
        (dp.HerkRequest(whole), "c64"),
        (dp.SyrkRequest(dev.zeros((4, 4), "f16")), "f16"),
    ):
        with pytest.raises(NoRow, match=reason):
            select(request, GPU)
    # fmt: on


def test_a_conjugate_that_is_no_transpose_is_refused(dev):
    a, b = dev.zeros((4, 4), "c64"), dev.zeros((4, 4), "c64")
    select(dp.TrsmRequest(a, b, trans="t"), GPU)
    select(dp.TrsmRequest(a.mT, b, trans="t"), GPU)
    for lies in (a, a.mT):
        select(dp.TrsmRequest(lies, b, trans="c"), GPU)  # where out is left open it lies so that it can be computed
        out = dev.zeros((4, 4), "c64")
        select(dp.TrsmRequest(lies, b, trans="c", out=out if lies is a else out.mT), GPU)
        with pytest.raises(NoRow, match="needs a in the order of out"):
            select(dp.TrsmRequest(lies, b, trans="c", out=out.mT if lies is a else out), GPU)
    real = dev.zeros((4, 4))
    select(dp.TrsmRequest(real.mT, real, trans="c"), GPU)  # of real ones it is the transpose


def test_library_names_the_rows(dev):
    a = dev.zeros((4, 4))
    assert select(dp.SyrkRequest(a, library="cublas"), GPU).library == "cublas"
    assert dp.syrk(a, library="cublas").shape == (4, 4)
    with pytest.raises(BadRequest, match="a library that has rows of syrk: cublas"):
        select(dp.SyrkRequest(a, library="cudnn"), GPU)
    with pytest.raises(BadRequest, match="library"):
        dp.SyrkRequest(a, library=3)


# -- what does not fit ------------------------------------------------------------------------------------------------
def refused(dev):
    """Requests that are no sound ones, with the words that say why."""
    square, tall, cube = dev.zeros((4, 4)), dev.zeros((4, 3)), dev.zeros((2, 4, 4))
    other, herm = dev.zeros((4, 4), "f64"), dev.zeros((4, 4), "c64")
    # fmt: off
    return {
        "a: got f32[4, 3]; expected f32[4, 4]":    lambda: dp.SymmRequest(tall, square),
        "expected f32[3, 3]":                      lambda: dp.SymmRequest(square, tall, side="right"),
        "b: got f64[4, 4]; expected f32":          lambda: dp.SymmRequest(square, other),
        "a: got f32[2, 4, 4]; expected a matrix":  lambda: dp.SyrkRequest(cube),
        "cuBLAS has no batched version":              lambda: dp.SyrkRequest(cube),
        "x[None] adds an axis":                    lambda: dp.SyrkRequest(dev.zeros((4,))),
        "b: got f32[4, 3]":                        lambda: dp.Syr2kRequest(square, tall),
        "c: got f32[4, 3]":                        lambda: dp.SyrkRequest(tall, c=tall),
        "out: got f32[4, 3]":                      lambda: dp.SyrkRequest(tall, out=tall),
        "side: got 'middle'":                      lambda: dp.SymmRequest(square, square, side="middle"),
        "uplo: got 'both'":                        lambda: dp.SyrkRequest(square, uplo="both"),
        "trans: got C; expected N or T":           lambda: dp.SyrkRequest(herm, trans="c"),
        "trans: got T; expected N or C":           lambda: dp.HerkRequest(herm, trans="t"),
        "diag: got 1":                             lambda: dp.TrsmRequest(square, square, diag=1),
        "alpha: got '2'; expected a real number":  lambda: dp.SyrkRequest(square, alpha="2"),
        "alpha: got 2j; expected a real number":   lambda: dp.SyrkRequest(square, alpha=2j),
        "alpha: got 1j; expected a real number":   lambda: dp.HerkRequest(herm, alpha=1j),
        "alpha: got True":                         lambda: dp.SyrkRequest(square, alpha=True),
        "alpha: got None":                         lambda: dp.SyrkRequest(square, alpha=None),
        "beta: got 1j":                            lambda: dp.Her2kRequest(herm, herm, c=herm, beta=1j),
        "beta: got 2; expected 0 without c":     lambda: dp.SyrkRequest(square, beta=2),
        "a: got f32[3, 4, 4]":                     lambda: dp.TrsmRequest(dev.zeros((3, 4, 4)), cube),
        "a: got f32[2, 4, 4]":                     lambda: dp.TrsmRequest(cube, square),
        "b: got f32[4]":                           lambda: dp.TrsmRequest(square, dev.zeros((4,))),
        "out: got memory that overlaps a":         lambda: dp.TrsmRequest(square, square[:, :2], out=square[:, 2:]),
        "out: got memory that overlaps b":         lambda: dp.TrmmRequest(dev.zeros((4, 4)), square.mT, out=square),
        "out: got a itself":                       lambda: dp.GeamRequest(square, cube[0], trans_a="t", out=square),
        "x: got f32[4]; expected f32[3]":          lambda: dp.DgmmRequest(tall, dev.zeros((4,)), side="right"),
    }
    # fmt: on


@pytest.mark.parametrize("words", refused(dp.device("host")))
def test_what_does_not_fit_is_refused_by_name(words, dev):
    with pytest.raises(BadRequest) as error:
        refused(dev)[words]()
    assert words in str(error.value)


@pytest.mark.parametrize("dtype", ["f32", "f64", "c64", "c128"])
def test_one_element_and_none(dtype, dev):
    one = dev.array(np.full((1, 1), 2.0, dp.Dtype.of(dtype).numpy))
    assert dp.trsm(one, one).numpy().item() == 1
    assert dp.syrk(one).numpy().item() == 4
    empty = dev.zeros((0, 0), dtype)
    for call in (dp.syrk, lambda x: dp.symm(x, x), lambda x: dp.trsm(x, x), lambda x: dp.geam(x, x)):
        assert call(empty).shape == (0, 0)
    assert dp.syrk(dev.zeros((3, 0), dtype)).numpy().tolist() == np.zeros((3, 3)).tolist()


def test_a_singular_triangle_gives_infinities_and_no_error(dev):
    a = np.diag([1.0, 0.0, 2.0])
    x = dp.trsm(dev.array(a), dev.array(np.ones((3, 1)))).numpy().ravel()
    assert x[:2].tolist() == [1, np.inf]
    assert np.isnan(x[2])  # 0 times infinity


@pytest.mark.parametrize("beta", [None, 1.0, -0.5])
def test_imaginary_parts_of_an_added_diagonal_count_as_0(beta, dev, rng):
    a = rng.standard_normal((3, 2)) + 1j * rng.standard_normal((3, 2))
    c = np.tril(a @ a.conj().T)
    marked = c.copy()
    np.fill_diagonal(marked, [complex(x.real, y) for x, y in zip(c.diagonal(), (np.nan, np.inf, 5), strict=True)])
    given = {} if beta is None else {"beta": beta}
    found = dp.herk(dev.array(a), c=dev.array(marked), **given).numpy()
    np.testing.assert_allclose(found, (1 + (1.0 if beta is None else beta)) * c, rtol=1e-14, atol=1e-14)
    assert (found.diagonal().imag == 0).all()
