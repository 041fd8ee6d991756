"""BLAS level 1 on the GPU: every row through its cases; numbers stay on the device."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.blas.cases import cases
from dispatch.table.cublas import LEVEL1

ROWS = [row for row in dp.TABLE if row.op in LEVEL1 and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case(row, case, try_row):
    try_row(row, case)


def test_numbers_follow_vectors_at_other_addresses(gpu, rng):
    for _ in range(80):
        x, y = rng.standard_normal((2, 500))
        np.testing.assert_allclose(dp.dot(gpu.array(x), gpu.array(y)).item(), x @ y, rtol=1e-10, atol=1e-11)
        assert dp.iamax(gpu.array(x)).item() == np.abs(x).argmax() + 1


@pytest.mark.parametrize("library", ["own", "cublas"])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", ["f32", "f64", "c64", "c128", "f16", "bf16"])
def test_large_vectors(dtype, first, library, gpu, rng):
    """So large that a block has several tiles; the same each time, at other addresses too, and from a graph."""
    x = gpu.array(rng.integers(-3, 4, 9_000_011), dtype)[first:]
    exact = x.numpy().astype(np.complex128 if dtype[0] == "c" else np.float64)
    size = np.sqrt((np.abs(exact) ** 2).sum())
    eps = {"f64": 1e-13, "c128": 1e-13, "f16": 2e-3, "bf16": 1e-2}.get(dtype, 1e-5)
    found = {float(dp.nrm2(one, library=library).item()) for one in [x] * 40 + [x.copy() for _ in range(3)]}
    assert all(abs(one - size) <= eps * size for one in found)
    if library == "own":
        assert len(found) == 1
    if library == "own" and dtype in ("f32", "f16", "bf16"):
        y = dp.axpy(x, x, alpha=2, library=library)
        np.testing.assert_array_equal(y.numpy(), (3 * exact).astype(y.numpy().dtype))
        assert dp.axpy(x, y, alpha=-3, out=y, library=library) is y
        assert not y.numpy().any()


@pytest.mark.parametrize("dtype", ["f64", "c128", "f32", "c64"])
def test_no_norm_of_a_large_vector_overflows_or_vanishes(dtype, gpu):
    info = np.finfo(dp.Dtype.of(dtype).numpy)
    for value in (float(info.max) / 2000, float(info.tiny), float(info.smallest_subnormal), 0.0):
        x = gpu.array(np.full(1 << 20, value), dtype)
        assert dp.nrm2(x, library="own").item() == pytest.approx(1024 * value, rel=1e-6, abs=0)
    x = np.zeros(1 << 20)
    for place, value, norm in ((5, 1.0, 1.0), (1 << 19, np.inf, np.inf), (77_777, np.nan, np.nan)):
        x[place] = value
        np.testing.assert_equal(float(dp.nrm2(gpu.array(x, dtype), library="own").item()), norm)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_a_rotation_that_is_found_makes_0_of_b(dtype, gpu, rng):
    """Also where a is 0, whose phase is the library's choice; nothing comes to the host in between."""
    eps = 8 * np.finfo(dtype).eps
    for a in (0, *rng.standard_normal(4)):
        b = rng.standard_normal() + (1j if np.dtype(dtype).kind == "c" else 0)
        x, y = gpu.array(np.array([a], dtype)), gpu.array(np.array([b], dtype))
        c, s, r, _ = dp.rotg(x.reshape(()), y.reshape(()))
        first, second = dp.rot(x, y, c, s)
        assert abs(first.numpy()[0] - r.item()) < eps * abs(r.item())
        assert abs(second.numpy()[0]) < eps * abs(r.item())
        assert abs(abs(r.item()) - np.hypot(abs(a), abs(b))) < eps * abs(r.item())
