"""BLAS level 2 on the host against SciPy, and refusals."""

import numpy as np
import pytest
import scipy.linalg

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import Arch
from dispatch.table.select import select

GPU = Arch(90)


@pytest.fixture
def dev():
    return dp.device("host")


# -- in SciPy's words -------------------------------------------------------------------------------------------------
def test_a_band_is_stored_as_scipy_has_it(dev, rng):
    kl, ku, n = 2, 1, 7
    ab, x = rng.standard_normal((kl + ku + 1, n)), rng.standard_normal(n)
    ab[ku] += 6
    y = dp.gbmv(dev.array(ab.T.copy()).mT, dev.array(x), kl=kl, ku=ku).numpy()
    np.testing.assert_allclose(scipy.linalg.solve_banded((kl, ku), ab, y), x, rtol=1e-9, atol=1e-12)


def test_a_symmetric_band_is_stored_as_scipy_has_it(dev, rng):
    for upper in (True, False):
        ab, x = rng.standard_normal((3, 6)), rng.standard_normal(6)
        ab[2 if upper else 0] += 8
        uplo = "upper" if upper else "lower"
        y = dp.sbmv(dev.array(ab.T.copy()).mT, dev.array(x), uplo=uplo).numpy()
        np.testing.assert_allclose(scipy.linalg.solveh_banded(ab, y, lower=not upper), x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("uplo", ["lower", "upper"])
def test_packed_triangles_are_lapack_s(uplo, dev, rng):
    full = rng.standard_normal((5, 5)) + 5 * np.eye(5)
    ap, _ = scipy.linalg.lapack.dtrttp(full, uplo=uplo[0].upper())
    triangle = np.tril(full) if uplo == "lower" else np.triu(full)
    x = rng.standard_normal(5)
    np.testing.assert_allclose(dp.tpmv(dev.array(ap), dev.array(x), uplo=uplo).numpy(), triangle @ x)
    np.testing.assert_allclose(triangle @ dp.tpsv(dev.array(ap), dev.array(x), uplo=uplo).numpy(), x, atol=1e-12)
    outer, _ = scipy.linalg.lapack.dtrttp(np.outer(x, x), uplo=uplo[0].upper())
    np.testing.assert_allclose(dp.spr(dev.array(x), uplo=uplo, alpha=2).numpy(), 2 * outer)


def test_vectors_go_backwards_and_lie_anywhere(dev, rng):
    a, x = rng.standard_normal((4, 6)), rng.standard_normal(11)
    got = dp.gemv(dev.array(a), dev.array(x)[::-2]).numpy()
    np.testing.assert_allclose(got, a @ x[::-2])
    columns = rng.standard_normal((6, 3))
    np.testing.assert_allclose(dp.gemv(dev.array(a), dev.array(columns)[:, 1]).numpy(), a @ columns[:, 1])


def test_outer_products(dev, rng):
    x, y = (rng.standard_normal(n) + 1j * rng.standard_normal(n) for n in (3, 4))
    np.testing.assert_allclose(dp.geru(dev.array(x), dev.array(y)).numpy(), np.outer(x, y))
    np.testing.assert_allclose(dp.gerc(dev.array(x), dev.array(y)).numpy(), np.outer(x, y.conj()))
    a = rng.standard_normal((3, 3)) + 0j
    got = dp.her(dev.array(x), a=dev.array(a), uplo="upper").numpy()
    np.testing.assert_allclose(got, np.triu(a + np.outer(x, x.conj())) + np.tril(a, -1))


def test_a_product_without_terms_is_beta_times_y(dev):
    a, none, y = dev.zeros((3, 0)), dev.zeros((0,)), dev.array(np.array([1, 2, np.nan], np.float32))
    assert dp.gemv(a, none).numpy().tolist() == [0, 0, 0]
    assert dp.gemv(a, none, y=y, beta=2).numpy()[:2].tolist() == [2, 4]
    assert dp.gemv(a, none, y=y, beta=0).numpy().tolist() == [0, 0, 0]


# -- what lies as cuBLAS does not take it, or does not fit ---------------------------------------------------------
def test_what_cublas_does_not_take_is_refused_with_its_reason(dev):
    a, x, c = dev.zeros((4, 4)), dev.zeros((4,)), dev.zeros((4, 4), "c64")
    z = dev.zeros((4,), "c64")
    everywhere = dev.zeros((1,)).numpy()
    broadcast = dp.from_dlpack(np.broadcast_to(everywhere, (4,)))
    for request, reason in (
        (dp.GemvRequest(a[:, ::2], x[:2]), "a row-major or column-major"),
        (dp.GemvRequest(a, broadcast), "x with a stride other than 0"),
        (dp.SbmvRequest(dev.zeros((2, 4)), x), "needs ab column-major"),
        (dp.TpmvRequest(dev.zeros((20,))[::2], x), "needs ap dense"),
        (dp.HemvRequest(c, z[::-1]), "x with a stride above 0"),
        (dp.SprRequest(z), "c64"),
        (dp.GerRequest(z, z), "c64"),
    ):
        with pytest.raises(NoRow, match=reason):
            select(request, GPU)
    for request, function in (
        (dp.HemvRequest(c, z), "cublasChemv_v2"),
        (dp.HemvRequest(c.mT, z[::-1]), "cublasChemv_v2"),
        (dp.GemvRequest(c, z, trans="c"), "cublasCgemv_v2"),
        (dp.SbmvRequest(dev.zeros((4, 2)).mT, x), "cublasSsbmv_v2"),
    ):
        assert select(request, GPU).function == function


def refused(dev):
    """Requests that are no sound ones, with the words that say why."""
    a, x, z = dev.zeros((4, 3)), dev.zeros((3,)), dev.zeros((3,), "c64")
    # fmt: off
    return {
        "x: got f32[3]; expected f32[4]":            lambda: dp.GemvRequest(a, x, trans="t"),
        "x: got f32[4, 3]; expected f32[3]":         lambda: dp.GemvRequest(a, a),
        "a: got f32[3]; expected a matrix":          lambda: dp.GemvRequest(x, x),
        "y: got f32[3]; expected f32[4]":            lambda: dp.GemvRequest(a, x, y=x),
        "out: got f32[3]; expected f32[4]":          lambda: dp.GemvRequest(a, x, out=x),
        "beta: got 1.5; expected 0 without y":       lambda: dp.GemvRequest(a, x, beta=1.5),
        "a: got f32[4, 3]; expected f32[3, 3]":      lambda: dp.SymvRequest(a, x),
        "ab: got f32[4, 3]; expected f32[3, 3]":     lambda: dp.GbmvRequest(a, x, kl=1, ku=1),
        "kl: got -1":                                lambda: dp.GbmvRequest(a, x, kl=-1, ku=1),
        "m: got -2":                                 lambda: dp.GbmvRequest(a, x, kl=1, ku=2, m=-2),
        "ap: got f32[5]; expected n · (n + 1) / 2":  lambda: dp.SpmvRequest(dev.zeros((5,)), x),
        "x: got f32[4, 3]; expected a vector":       lambda: dp.GerRequest(a, x),
        "y: got c64[3]; expected f32[3]":            lambda: dp.Syr2Request(x, z),
        "alpha: got 1j; expected a real number":     lambda: dp.HerRequest(z, alpha=1j),
        "out: got memory that overlaps x":           lambda: dp.GemvRequest(a[:3], x, out=x),
        "diag: got 'maybe'":                         lambda: dp.TrmvRequest(a[:3], x, diag="maybe"),
    }
    # fmt: on


@pytest.mark.parametrize("words", refused(dp.device("host")))
def test_what_does_not_fit_is_refused_by_name(words, dev):
    with pytest.raises(BadRequest) as error:
        refused(dev)[words]()
    assert words in str(error.value)


def test_one_element_and_none(dev):
    one, two = dev.array(np.full(1, 2.0)), dev.array(np.full((1, 1), 4.0))
    assert dp.trsv(two, one).numpy().tolist() == [0.5]
    assert dp.gemv(two, one).numpy().tolist() == [8]
    assert dp.spr(one).numpy().tolist() == [4]
    none, empty = dev.zeros((0,), "f64"), dev.zeros((0, 0), "f64")
    assert dp.trsv(empty, none).shape == dp.symv(empty, none).shape == dp.spr(none).shape == (0,)
    assert dp.ger(none, none).shape == (0, 0)


@pytest.mark.parametrize("uplo", ["lower", "upper"])
def test_an_alpha_of_0_leaves_a_hermitian_matrix_as_scipy_s_does(uplo, dev):
    x, a = np.array([1, 2j]), np.array([[1 + 5j, 2], [3, 4 - 1j]])
    expected = scipy.linalg.blas.zher(0, x, a=a, lower=uplo == "lower")
    assert (expected == a).all()
    assert (dp.her(dev.array(x), a=dev.array(a), alpha=0, uplo=uplo).numpy() == a).all()
    assert (dp.her2(dev.array(x), dev.array(x), a=dev.array(a), alpha=0, uplo=uplo).numpy() == a).all()
    packed = np.array([1 + 5j, 2, 4 - 1j])
    assert (dp.hpr(dev.array(x), ap=dev.array(packed), alpha=0, uplo=uplo).numpy() == packed).all()
    columns = dev.array(np.ones((2, 3), np.complex128))
    assert (dp.herk(columns, c=dev.array(a), alpha=0, uplo=uplo).numpy() == a).all()
    halved = dp.herk(columns, c=dev.array(a), alpha=0, beta=0.5, uplo=uplo).numpy()
    assert halved.diagonal().tolist() == [0.5, 2]


def test_leading_axes_of_a_product_are_numpy_s(dev, rng):
    a, x = rng.standard_normal((3, 4, 5)), rng.standard_normal((2, 3, 5))
    np.testing.assert_allclose(dp.gemv(dev.array(a), dev.array(x)).numpy(), (a @ x[..., None])[..., 0])
    np.testing.assert_allclose(dp.gemv(dev.array(a), dev.array(x[0, 0])).numpy(), a @ x[0, 0])
    np.testing.assert_allclose(dp.gemv(dev.array(a[:1]), dev.array(x[0])).numpy(), x[0] @ a[0].T)
    turned = dp.gemv(dev.array(a), dev.array(x[..., :4]), trans="t").numpy()
    np.testing.assert_allclose(turned, (np.swapaxes(a, -1, -2) @ x[..., :4, None])[..., 0])


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_may_give_f32(dtype, dev):
    a, x = dev.array(np.full((2, 5000), 0.25), dtype), dev.array(np.full(5000, 0.25), dtype)
    assert dp.gemv(a, x).dtype == dtype
    exact = dp.gemv(a, x, out=dev.zeros((2,)))
    assert (exact.dtype, exact.numpy().tolist()) == ("f32", [312.5, 312.5])
    assert dp.gemv(a, x, y=dev.array(np.array([1, 2], np.float32)), beta=1).numpy().tolist() == [313.5, 314.5]
    assert select(dp.GemvRequest(a, x, out=exact), GPU).function.endswith("SSgemvStridedBatched")
    with pytest.raises(NoRow, match="needs a with at least one column"):
        select(dp.GemvRequest(a[:, :0], x[:0]), GPU)
    with pytest.raises(BadRequest, match=r"x: got .*; expected leading axes that broadcast"):
        dp.GemvRequest(dev.zeros((3, 2, 4)), dev.zeros((2, 4)))
