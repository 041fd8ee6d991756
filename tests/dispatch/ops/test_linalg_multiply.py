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
