"""What results are held against: a bound must hold for what the hardware does, and would not for much more."""

import math

import numpy as np
import pytest

from dispatch.keys import F8E4M3, F8E5M2
from dispatch.testing.tensor_cores import CUT_OFF


def tensor_core(a, b, promoted):
    """A dot product as Hopper's fp8 tensor cores add it up: 32 products and the sum so far, cut off 13 bits behind.

    So is what comes of it. Sums of as many products as are `promoted` together are added exactly.
    """
    parts = range(0, len(a), promoted)
    return sum(one_sum(a[start : start + promoted], b[start : start + promoted]) for start in parts)


def one_sum(a, b):
    total = 0.0
    for start in range(0, len(a), 32):
        terms = [*(a[start : start + 32] * b[start : start + 32]), total]
        unit = 2.0 ** (max(math.floor(math.log2(abs(x))) for x in terms if x) - 13)
        total = sum(math.trunc(x / unit) * unit for x in terms)
        unit = 2.0 ** (math.floor(math.log2(abs(total) or 1)) - 13)
        total = math.trunc(total / unit) * unit
    return total


@pytest.mark.parametrize("promoted", [128, 1024], ids=["promoted", "fast"])
@pytest.mark.parametrize("signs", ["mixed", "one"])
@pytest.mark.parametrize("k", [1, 32, 33, 200, 384, 1000])
def test_what_fp8_tensor_cores_lose_is_within_its_bound(k, signs, promoted, rng):
    a, b = rng.standard_normal((5, k)), rng.standard_normal((k, 7))
    if signs == "one":
        a, b = np.abs(a), np.abs(b)
    a, b = (x.astype(dtype.numpy).astype(np.float64) for x, dtype in ((a, F8E5M2), (b, F8E4M3)))
    lost = np.abs(a @ b - [[tensor_core(row, column, promoted) for column in b.T] for row in a])
    allowed = CUT_OFF.product(a, b, np.dtype(np.float64))
    assert (lost <= allowed).all()
    if k > 1:
        assert lost.max() > allowed.max() / 64, "a bound that nothing comes near would hide a fault"


def test_nothing_is_lost_of_a_sum_of_zeros():
    assert (CUT_OFF.product(np.zeros((2, 40)), np.ones((40, 3)), np.dtype(np.float64)) == 0).all()
