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
