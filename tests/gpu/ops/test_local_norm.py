"""Local normalization on the GPU: every row through its cases, and LRN against torch's, with its gradient."""

import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.local_norm.cases import cases

OPS = ("lrn", "lrn_bwd", "divisive_norm", "divisive_norm_bwd")
ROWS = [row for row in dp.TABLE if row.op in OPS and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("window", [1, 3, 5, 11])
@pytest.mark.parametrize("shape", [(2, 19), (2, 7, 5), (3, 16, 9, 7), (2, 8, 3, 5, 4)])
def test_values_and_gradients_are_those_of_torch(shape, window, rng):
    torch = pytest.importorskip("torch")
    x = torch.tensor(rng.standard_normal(shape), device="cuda", requires_grad=True)
    dy = torch.tensor(rng.standard_normal(shape), device="cuda")
    normalize = torch.nn.LocalResponseNorm(window, alpha=0.8, beta=0.6, k=1.2)
    expected = normalize(x[..., None] if x.dim() == 2 else x).reshape(shape)
    (gradient,) = torch.autograd.grad(expected, x, dy)
    fields = {"window": window, "alpha": 0.8, "beta": 0.6, "k": 1.2}
    ours, ours_dy = dp.from_dlpack(x.detach()), dp.from_dlpack(dy)
    y = dp.lrn(ours, **fields)
    torch.testing.assert_close(torch.from_dlpack(y), expected.detach(), rtol=1e-12, atol=1e-12)
    dx = dp.lrn_bwd(ours, y, ours_dy, **fields)
    torch.testing.assert_close(torch.from_dlpack(dx), gradient, rtol=1e-11, atol=1e-12)
