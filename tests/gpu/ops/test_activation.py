"""Activations on the GPU: every row through its cases, and their gradients against torch's."""

import numpy as np
import pytest

import dispatch
from dispatch.keys import HOST
from dispatch.ops.activation import ActivationMode, activation, activation_bwd
from dispatch.ops.activation.cases import cases

ROWS = [row for row in dispatch.TABLE if row.op in ("activation", "activation_bwd") and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
M = ActivationMode


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


@pytest.mark.parametrize("mode", list(ActivationMode))
def test_values_and_gradients_are_those_of_torch(mode, rng):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    same = {
        M.SIGMOID: torch.sigmoid,
        M.RELU: functional.relu,
        M.TANH: torch.tanh,
        M.CLIPPED_RELU: functional.relu6,
        M.ELU: functional.elu,
        M.SWISH: functional.silu,
    }
    coef = 6.0 if mode is M.CLIPPED_RELU else 1.0
    x = torch.tensor(rng.standard_normal((5, 37)) * 4, device="cuda", requires_grad=True)
    dy = torch.tensor(rng.standard_normal((5, 37)), device="cuda")
    expected = same[mode](x)
    expected.backward(dy)
    ours = dispatch.from_dlpack(x.detach())
    y = activation(ours, mode=mode, coef=coef)
    dx = activation_bwd(ours, y, dispatch.from_dlpack(dy), mode=mode, coef=coef)
    np.testing.assert_allclose(y.numpy(), expected.detach().cpu().numpy(), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dx.numpy(), x.grad.cpu().numpy(), rtol=1e-11, atol=1e-13)
