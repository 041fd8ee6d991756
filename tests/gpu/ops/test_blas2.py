"""BLAS level 2 on the GPU: every row through its cases, and calls that are repeated at other addresses."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import NoRow
from dispatch.keys import HOST
from dispatch.ops.blas.cases import cases
from dispatch.ops.blas.symmetric_kernels import MAX_ROWS
from dispatch.table.cublas import LEVEL2

ROWS = [row for row in dp.TABLE if row.op in LEVEL2 and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case(row, case, try_row):
    try_row(row, case)


def test_calls_at_other_addresses_follow_them_and_their_numbers(gpu, rng):
    """Beyond the calls after which a plan is launched as a graph, with vectors that go backwards."""
    for number in range(80):
        a, x, y = rng.standard_normal((9, 7)), rng.standard_normal(7), rng.standard_normal(9)
        alpha, beta = 0.5 + number, -0.25 - number
        got = dp.gemv(gpu.array(a), gpu.array(x)[::-1], alpha=alpha, y=gpu.array(y), beta=beta).numpy()
        np.testing.assert_allclose(got, alpha * a @ x[::-1] + beta * y, rtol=1e-12, atol=1e-11)
        outer = dp.ger(gpu.array(y), gpu.array(x), alpha=alpha, a=gpu.array(a)).numpy()
        np.testing.assert_allclose(outer, alpha * np.outer(y, x) + a, rtol=1e-12, atol=1e-11)


def test_what_a_row_major_hermitian_matrix_goes_by(gpu, rng):
    a = rng.standard_normal((40, 40)) + 1j * rng.standard_normal((40, 40))
    x = rng.standard_normal(40) + 1j * rng.standard_normal(40)
    full = np.tril(a, -1) + np.conj(np.tril(a, -1).T) + np.diag(a.diagonal().real)
    np.testing.assert_allclose(dp.hemv(gpu.array(a), gpu.array(x)).numpy(), full @ x, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dp.gemv(gpu.array(a), gpu.array(x), trans="c").numpy(), np.conj(a.T) @ x, rtol=1e-12)
    np.testing.assert_allclose(dp.gerc(gpu.array(x), gpu.array(x)).numpy(), np.outer(x, np.conj(x)), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["f32", "f64", "c64", "c128"])
def test_large_symmetric_matrices(dtype, gpu, rng):
    """The same each time, at other addresses and from a graph, too; up to the most rows that the kernel takes."""
    for n, row, uplo in (
        (256, True, "lower"),
        (2049, False, "lower"),
        (4100, True, "upper"),
        (MAX_ROWS, True, "lower"),
    ):
        op = dp.hemv if dtype[0] == "c" and n % 2 == 0 else dp.symv
        whole = rng.integers(-3, 4, (n, n)).astype(np.complex64 if dtype[0] == "c" else np.float32)
        whole += 1j * rng.integers(-3, 4, (n, n)) if dtype[0] == "c" else 0
        half = np.where(np.tri(n, dtype=bool) if uplo == "lower" else np.tri(n, dtype=bool).T, whole, np.nan)
        a = gpu.array(half if row else half.T.copy(), dtype)
        a = a if row else a.mT
        kept = np.nan_to_num(half)
        mirrored = np.conj(kept.T) if op is dp.hemv else kept.T
        full = kept + mirrored - np.diag(mirrored.diagonal())
        if op is dp.hemv:
            full[np.diag_indices(n)] = full.diagonal().real
        x, y = (rng.integers(-3, 4, n).astype(full.dtype) for _ in range(2))
        xs = [gpu.array(x, dtype) for _ in range(3)]
        for number in range(60):  # sums of whole numbers, exact in any order
            alpha, beta = 1 + number % 3, (0, 2)[number % 2]
            added = gpu.array(y if beta else np.full(n, np.nan), dtype)
            made = op(a, xs[number % 3], alpha=alpha, y=added, beta=beta, uplo=uplo, library="own")
            if number % 10 < 2:
                np.testing.assert_array_equal(made.numpy(), alpha * (full @ x) + beta * y)
        vector = gpu.array(rng.standard_normal(n), dtype)
        assert len({op(a, vector, uplo=uplo, library="own").numpy().tobytes() for _ in range(20)}) == 1


@pytest.mark.parametrize("dtype", ["f32", "f64", "c64", "c128"])
def test_symmetric_matrices_of_more_rows_are_cublas_s(dtype, gpu, rng):
    n = MAX_ROWS + 1
    half = np.tril(rng.integers(-3, 4, (n, n))).astype(np.float32)
    a, x = gpu.array(half, dtype), rng.integers(-3, 4, n).astype(np.float32)
    with pytest.raises(NoRow, match=f"needs 256 to {MAX_ROWS} rows, a is"):
        dp.symv(a, gpu.array(x, dtype), library="own")
    np.testing.assert_array_equal(dp.symv(a, gpu.array(x, dtype)).numpy(), half @ x + x @ np.tril(half, -1))
