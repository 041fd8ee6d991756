"""BLAS level 3 on the GPU: every row through its cases, against torch's and CuPy's, and what a repeat costs nothing."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.blas.cases import cases

OPS = ("symm", "hemm", "syrk", "herk", "syr2k", "her2k", "syrkx", "herkx", "trmm", "trsm", "geam", "dgmm")
ROWS = [row for row in dp.TABLE if row.op in OPS and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
DTYPES = (np.float32, np.float64, np.complex64, np.complex128)


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case(row, case, try_row):
    try_row(row, case)


def drawn(rng, dtype, *shape):
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 63, 300])
def test_many_small_systems_are_solved(n, dtype, gpu, rng):
    a, b = drawn(rng, dtype, 50, n, n) / n + 2 * np.eye(n, dtype=dtype), drawn(rng, dtype, 50, n, 3)
    x = dp.trsm(gpu.array(a), gpu.array(b)).numpy()
    tolerance = 50 * np.finfo(dtype).eps
    np.testing.assert_allclose(np.tril(a) @ x, b, rtol=tolerance * n, atol=tolerance * n)


def test_a_call_that_is_repeated_at_other_addresses_follows_them_and_its_numbers(gpu, rng):
    """Beyond the calls after which a plan is launched as a graph; the pointers of a batch are written anew, too."""
    for number in range(80):
        a, b = rng.standard_normal((6, 9, 9)) / 9 + 2 * np.eye(9), rng.standard_normal((6, 9, 4))
        alpha = 0.5 + number
        x = dp.trsm(gpu.array(a), gpu.array(b), alpha=alpha).numpy()
        np.testing.assert_allclose(np.tril(a) @ x, alpha * b, rtol=1e-12, atol=1e-12)
        c = rng.standard_normal((9, 9))
        got = dp.syrk(gpu.array(b[0]), alpha=alpha, c=gpu.array(c), beta=-0.25 - number).numpy()
        expected = np.tril(alpha * b[0] @ b[0].T - (0.25 + number) * c) + np.triu(c, 1)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_streams_have_handles_of_their_own(gpu, rng):
    a = rng.standard_normal((200, 100)).astype(np.float32)
    results = []
    for _ in range(4):
        with gpu.stream():
            results.append(dp.syrk(gpu.array(a)))
    for result in results:
        np.testing.assert_allclose(result.numpy(), np.tril(a @ a.T), rtol=1e-4, atol=1e-3)


def test_torch_s_tensors_are_operands(rng):
    torch = pytest.importorskip("torch")
    a = torch.tensor(np.tril(rng.standard_normal((64, 64)) / 64 + np.eye(64)), device="cuda")
    b = torch.tensor(rng.standard_normal((64, 5)), device="cuda")
    x = dp.trsm(a, b)
    assert isinstance(x, torch.Tensor)
    torch.testing.assert_close(x, torch.linalg.solve_triangular(a, b, upper=False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_singular_triangle_gives_infinities_and_no_error(dtype, gpu):
    a = np.eye(3, dtype=dtype)
    a[1, 1] = 0
    x = dp.trsm(gpu.array(a), gpu.array(np.ones((3, 1), dtype))).numpy()
    assert x[0, 0] == 1
    assert not np.isfinite(x[1, 0])


def test_a_product_of_f32_is_no_product_of_tf32(gpu, rng):
    a = rng.standard_normal((512, 512)).astype(np.float32)
    got = dp.syrk(gpu.array(a)).numpy()
    expected = np.tril(a.astype(np.float64) @ a.T.astype(np.float64))
    assert np.abs(got - expected).max() < 2e-3  # of TF32 it is 0.1


def test_symmetric_products_are_those_of_a_full_matrix(gpu, rng):
    a, b = rng.standard_normal((2, 96, 96))
    full = np.tril(a) + np.tril(a, -1).T
    a[np.triu_indices(96, 1)] = np.nan
    for side, expected in (("left", full @ b), ("right", b @ full)):
        got = dp.symm(gpu.array(a), gpu.array(b), side=side).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
