"""Every cutlass_grouped_gemm row on the GPU through all its cases; the groups' ends may change from call to call."""

import numpy as np
import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.cutlass_grouped_gemm.trials import GroupedTrial, cases

ROWS = [row for row in dp.TABLE.of("cutlass_grouped_gemm") if row.arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    device = dp.device("cuda:0")
    if device.arch != 90:
        pytest.skip(f"needs sm_90, this GPU is {device.arch}")
    return device


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_its_cases(row, case, gpu, rng):
    trial = case.trial(gpu, rng)
    call = dp.prepare(trial.request)
    assert call.row is row
    trial.check(call())
    again = case.trial(gpu, rng)
    again.check(dp.run(again.request))


def test_a_replay_reads_where_the_groups_end_then(gpu, rng):
    row = next(row for row in ROWS if row.dtypes[0].name == "bf16")
    request = cases(row)[0].request(gpu, rng)
    call = dp.prepare(request)
    total = request.a.shape[0]
    for _ in range(4):
        request.out.copy_from(np.full(request.out.shape, 7.0))
        request.ends.copy_from(np.sort(rng.integers(0, total + 1, request.groups)))
        GroupedTrial("other ends", request).check(call())
