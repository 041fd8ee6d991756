"""Products with Q of a QR factorization: against SciPy, edges, refusals."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest


@pytest.fixture
def dev():
    pytest.importorskip("scipy")
    return dp.device("host")


def drawn(rng, dtype, shape):
    a = rng.standard_normal(shape)
    return (a + 1j * rng.standard_normal(shape) if dtype[0] == "c" else a).astype(dtype)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5), (1, 1)])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_the_products_are_scipys(dtype, shape, dev, rng):
    from scipy import linalg

    a = drawn(rng, dtype, shape)
    for mode, extents in (("left", (min(shape), 3)), ("right", (3, shape[0]))):
        c = drawn(rng, dtype, extents)
        expected = linalg.qr_multiply(a, c, mode)
        for one, other in zip(dp.linalg.qr_multiply(dev.array(a), dev.array(c), mode), expected, strict=True):
            np.testing.assert_allclose(one.numpy(), other, atol=1e-12)


def test_what_is_not_finite_spreads_and_nothing_gives_zeros(dev, rng):
    a = drawn(rng, "f8", (5, 3))
    a[4, 0] = np.nan
    for one in dp.qr_multiply(dev.array(a), dev.array(np.eye(5))):
        assert np.isnan(one.numpy()).any()
    out, r = dp.qr_multiply(dev.zeros((2, 4, 0)), dev.zeros((2, 0, 3)), mode="left")
    assert (out.shape, r.shape) == ((2, 4, 3), (2, 0, 0))
    assert not out.numpy().any()
    _, r = dp.qr_multiply(dev.array(np.eye(3)), dev.zeros((0, 3), "f64"))
    np.testing.assert_array_equal(np.abs(r.numpy()), np.eye(3))


REFUSED = {
    r"c: got f32.4, 2.; expected f32.3, p., for Q·C of a .4, 3.": ((4, 3), (4, 2), "left"),
    r"c: got f32.2, 3.; expected f32.p, 4., for C·Q of a .4, 3.": ((4, 3), (2, 3), "right"),
    r"c: got f32.2, 4.; expected f32.2, p, 4.": ((2, 4, 3), (2, 4), "right"),
    r"c: got f32.4.; expected f32.p, 4.": ((4, 3), (4,), "right"),
    "QrSide: LEFT, RIGHT": ((4, 3), (2, 4), "both"),
}


@pytest.mark.parametrize("said", REFUSED)
def test_bad_input_is_refused_before_a_call(said, dev):
    a, c, mode = REFUSED[said]
    with pytest.raises(BadRequest, match=said):
        dp.qr_multiply(dev.zeros(a), dev.zeros(c), mode=mode)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (5, 5), (2, 6, 3), (1, 1)])
@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_reflectors_make_q_and_products_with_it(dtype, shape, dev, rng):
    a = drawn(rng, dtype, shape)
    h, tau = dp.linalg.qr(dev.array(a), "raw")
    q, r = (one.numpy() for one in dp.linalg.qr(dev.array(a), "complete"))
    rows, least = shape[-2], min(shape[-2:])
    np.testing.assert_allclose(dp.linalg.orgqr(h, tau).numpy(), q[..., :least], atol=1e-13)
    np.testing.assert_allclose(dp.linalg.orgqr(h, tau, columns=rows).numpy(), q, atol=1e-13)
    np.testing.assert_allclose(np.triu(h.numpy()), r, atol=1e-13)
    c = drawn(rng, dtype, (*shape[:-2], rows, 3))
    for adjoint, one in ((False, q), (True, q.conj().mT)):
        found = dp.linalg.ormqr(h, tau, dev.array(c), adjoint=adjoint).numpy()
        np.testing.assert_allclose(found, one @ c, atol=1e-12)
        found = dp.linalg.ormqr(h, tau, dev.array(c.mT), side="right", adjoint=adjoint).numpy()
        np.testing.assert_allclose(found, c.mT @ one, atol=1e-12)


def test_fewer_reflectors_are_a_product_of_fewer_and_none_are_the_identity(dev, rng):
    h, tau = dp.qr(dev.array(drawn(rng, "f8", (5, 4))), mode="raw")
    first = dp.orgqr(h, tau[:1], columns=5).numpy()
    v = np.concatenate([[1.0], h.numpy()[1:, 0]])
    np.testing.assert_allclose(first, np.eye(5) - tau.numpy()[0] * np.outer(v, v), atol=1e-13)
    np.testing.assert_array_equal(dp.orgqr(h, tau[:0], columns=2).numpy(), np.eye(5, 2))
    out = dev.array(np.ones((5, 2)))
    assert dp.ormqr(h, tau, out, out=out) is out
    assert dp.ormqr(dev.zeros((0, 3)), dev.zeros((0,)), dev.zeros((0, 2))).shape == (0, 2)


UNFIT = {
    r"tau: got f32.5.; expected f32.k., of k up to 3, for h .4, 3.": lambda dev: dp.orgqr(
        dev.zeros((4, 3)), dev.zeros((5,))
    ),
    r"tau: got f64.3.; expected f32.3., dense": lambda dev: dp.orgqr(dev.zeros((4, 3)), dev.zeros((3,), "f64")),
    "columns: got 5; expected .*3 to 4": lambda dev: dp.orgqr(dev.zeros((4, 3)), dev.zeros((3,)), columns=5),
    r"c: got f32.3, 2.; expected f32.4, p., for Q·C of h .4, 3.": lambda dev: dp.ormqr(
        dev.zeros((4, 3)), dev.zeros((3,)), dev.zeros((3, 2))
    ),
    r"c: got f32.3, 2.; expected f32.p, 4., for C·Q": lambda dev: dp.ormqr(
        dev.zeros((4, 3)), dev.zeros((3,)), dev.zeros((3, 2)), side="right"
    ),
}


@pytest.mark.parametrize("said", UNFIT)
def test_reflectors_that_do_not_fit_are_refused(said, dev):
    with pytest.raises(BadRequest, match=said):
        UNFIT[said](dev)
