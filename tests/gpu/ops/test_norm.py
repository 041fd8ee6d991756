"""Every normalization row that this GPU can run, through all of its cases, with fresh numbers and poisoned outputs.

A case that a rule of its row refuses must raise NoRow with that reason. Gradients are held against torch's as well.
"""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.norm import NormMode
from dispatch.ops.norm.cases import cases
from dispatch.row_check import check_row

ROWS = [row for row in dispatch.TABLE if row.op.startswith("norm_") and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    return dispatch.device("cuda:0")


def skip_unless_for(row, gpu):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch}, this GPU is {gpu.arch}")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, gpu, rng):
    skip_unless_for(row, gpu)
    check_row(row, case, gpu, rng)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_repeated_request_is_right_each_time(row, gpu, rng):
    """The second run of the same addresses is recorded and the third is a replay; each reads what is there then."""
    skip_unless_for(row, gpu)
    check = next(case for case in cases(row) if case.name in ("layer", "group")).check(gpu, rng)
    for _ in range(4):
        check.renew()
        check.verify(dispatch.run(check.request))


@pytest.mark.parametrize("mode", [NormMode.LAYER_NORM, NormMode.BATCH_NORM, NormMode.GROUP_NORM])
def test_gradients_against_torch(mode, gpu, rng):
    """Forward and backward in a row, on what the forward gave back, against autograd of the same operands."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    shape, width = ((33, 48), (48,)) if mode is NormMode.LAYER_NORM else ((5, 16, 7, 9), (16,))
    arrays = [rng.standard_normal(s).astype(np.float32) for s in (shape, width, width, shape)]
    x, scale, bias, dy = (gpu.array(array) for array in arrays)
    groups = 4 if mode is NormMode.GROUP_NORM else 1
    y, mean, inverse = dispatch.norm_fwd(x, scale, bias, mode=mode, training=True, groups=groups)
    ours = dispatch.norm_bwd(dy, x, scale, inverse, mean, mode=mode, groups=groups)
    given = [torch.from_numpy(array).cuda().requires_grad_() for array in arrays[:3]]
    if mode is NormMode.LAYER_NORM:
        expected = torch.nn.functional.layer_norm(given[0], width, given[1], given[2])
    elif mode is NormMode.GROUP_NORM:
        expected = torch.nn.functional.group_norm(given[0], groups, given[1], given[2])
    else:
        expected = torch.nn.functional.batch_norm(given[0], None, None, given[1], given[2], training=True)
    expected.backward(torch.from_numpy(arrays[3]).cuda())
    for mine, theirs in zip((y, *ours), (expected, *(t.grad for t in given)), strict=True):
        wanted = theirs.detach().cpu().numpy()
        assert np.abs(mine.numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()
