"""Merging attention over parts of the keys on the GPU: every row through its cases, and two halves against all keys."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.attention_merge.cases import cases

ROWS = [row for row in dp.TABLE.of("attention_merge") if row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_two_halves_of_the_keys_are_all_of_them(dtype, rng):
    dev = dp.device("cuda:0")
    q, k, v = (dev.array(rng.standard_normal((2, 4, 256, 64)).astype(np.float32)).astype(dtype) for _ in range(3))
    for _ in range(3):  # made, remembered, and once more
        halves = [dp.sdpa_fwd(q, k[:, :, s], v[:, :, s], stats=True) for s in (slice(0, 96), slice(96, 256))]
        found, stats = dp.attention_merge(*halves[0], *halves[1], out_dtype=dtype)
        whole, sums = dp.sdpa_fwd(q, k, v, stats=True)
        unit = 2.0 ** (-11 if dtype == "f16" else -8)
        assert np.abs(found.numpy().astype(np.float64) - whole.numpy().astype(np.float64)).max() < 8 * unit
        assert np.abs(stats.numpy() - sums.numpy()).max() < 1e-3
