"""What results are held against: a bound must hold for what the hardware does, and would not for much more."""

import math

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import F8E4M3, F8E5M2, Compute
from dispatch.ops.matmul.bounds import bounds
from dispatch.ops.matmul.reference import reference
from dispatch.testing.tensor_cores import CUT_OFF, STRUCTURED_CUT_OFF


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


@pytest.mark.parametrize("k", [4, 64, 68, 256, 320, 1000])
def test_of_a_structured_matrix_that_is_lost_which_is_lost_of_the_products_it_has(k, rng):
    """Two of each four along k are multiplied: those alone, one behind another, lose the same."""
    work = np.dtype(np.float64)
    b = rng.standard_normal((k, 7)).astype(F8E4M3.numpy).astype(work)
    for _ in range(5):
        kept = np.sort(np.concatenate([4 * group + rng.permutation(4)[:2] for group in range(k // 4)]))
        a = np.zeros((1, k))
        a[0, kept] = rng.standard_normal(len(kept)).astype(F8E5M2.numpy)
        lost = CUT_OFF.product(a[:, kept], b[kept], work)
        np.testing.assert_array_equal(STRUCTURED_CUT_OFF.product(a, b, work), lost)


def test_nothing_is_lost_of_a_sum_of_zeros():
    assert (CUT_OFF.product(np.zeros((2, 40)), np.ones((40, 3)), np.dtype(np.float64)) == 0).all()


def in_half(a, b, *, cut_off):
    """A product whose sums are in f16 behind every 16 terms, cut off or rounded to it."""
    total = np.zeros((len(a), b.shape[1]))
    for start in range(0, a.shape[1], 16):
        total = total + a[:, start : start + 16] @ b[start : start + 16]
        half = total.astype(np.float16)
        beyond = np.abs(half.astype(np.float64)) > np.abs(total)
        total = np.where(beyond & cut_off, np.nextafter(half, np.float16(0)), half).astype(np.float64)
    return total


@pytest.mark.parametrize("cut_off", [False, True], ids=["rounded", "cut off"])
@pytest.mark.parametrize("k", [1, 16, 33, 256, 1024, 8192])
def test_what_sums_in_f16_lose_is_within_their_bound(k, cut_off, rng):
    """Of both signs and of one, where roundings that go one way add up."""
    for positive in (False, True):
        dev = dp.device("host")
        drawn = [rng.standard_normal(shape) / k**0.25 for shape in ((24, k), (k, 17))]
        a, b = (dev.array(np.abs(one) if positive else one, "f16") for one in drawn)
        request = dp.MatmulRequest(a, b, compute="16f")
        exact = reference(request)
        lost = np.abs(in_half(a.numpy().astype(float), b.numpy().astype(float), cut_off=cut_off) - exact["out"])
        allowed = bounds(request, Compute.COMPUTE_16F, exact)["out"]
        assert (lost <= allowed).all()
        if k > 1000 and positive and cut_off:
            assert lost.max() > allowed.max() / 10, "a bound that nothing comes near would hide a fault"


def test_sums_of_whole_numbers_in_f16_are_exact_up_to_2048():
    dev = dp.device("host")
    ones = dev.array(np.ones((2, 2048)), "f16")
    request = dp.MatmulRequest(ones, ones.T, compute="16f")
    assert not bounds(request, Compute.COMPUTE_16F, reference(request))["out"].any()
    assert (dp.run(request).numpy() == 2048).all()
    more = dev.array(np.ones((2, 2049)), "f16")
    request = dp.MatmulRequest(more, more.T, compute="16f")
    assert bounds(request, Compute.COMPUTE_16F, reference(request))["out"].all()


@pytest.mark.parametrize("library", ["cublas", "cublasLt"])
def test_sums_in_f16_are_a_row_of_both_libraries(library):
    a = dp.device("host").array(np.ones((3, 5)), "f16")
    found = dp.matmul(a, a.T, compute="16f", alpha=0.5, library="numpy-cublas" if library == "cublas" else None)
    assert found.dtype.name == "f16"
    assert (found.numpy() == 2.5).all()
