"""Gated activations on the GPU: every row through its cases, and their gradients against torch's."""

import pytest

import dispatch as dp
from dispatch.keys import HOST
from dispatch.ops.gated import GatedMode
from dispatch.ops.gated.cases import cases

OPS = ("gated_activation", "gated_activation_bwd")
ROWS = [row for op in OPS for row in dp.TABLE.of(op) if row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]
MODES = [mode.name.lower() for mode in GatedMode]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, try_row):
    try_row(row, case)


def theirs(mode):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    others = {"gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"), "sigmoid": torch.sigmoid}
    return others.get(mode) or getattr(functional, mode)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_of_halves_against_torch(mode, dtype):
    torch = pytest.importorskip("torch")
    gated = pytest.importorskip("dispatch.torch").gated_activation
    dtype = getattr(torch, dtype)
    for shape in ((4, 512, 256), (3, 77, 46), (4, 512, 256), (3, 77, 46)):
        torch.manual_seed(0)
        whole = torch.randn(shape, device="cuda", dtype=dtype).requires_grad_()
        wide = whole.detach().double().requires_grad_()
        with torch.no_grad():
            plain = gated(*whole.chunk(2, -1), mode)
        y = gated(*whole.chunk(2, -1), mode)
        gate, up = wide.chunk(2, -1)
        expected = theirs(mode)(gate) * up
        assert torch.equal(plain, y)
        dy = torch.randn_like(y)
        (found,), (wanted,) = torch.autograd.grad(y, whole, dy), torch.autograd.grad(expected, wide, dy.double())
        for one, other in ((y, expected), (found, wanted)):
            assert (one.double() - other).norm() <= 2 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("mode", MODES)
def test_it_is_no_further_off_than_torch(mode):
    torch = pytest.importorskip("torch")
    gated = pytest.importorskip("dispatch.torch").gated_activation
    torch.manual_seed(1)
    gate, up = (torch.randn(2048, 2816, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact = theirs(mode)(gate.double()) * up.double()
    ours, other = (y.double() - exact for y in (gated(gate, up, mode), theirs(mode)(gate) * up))
    assert ours.norm() <= other.norm()
