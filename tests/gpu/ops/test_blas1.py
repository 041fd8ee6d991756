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
