"""`dispatch.torch.gated_activation` beside torch's own functions in f64, and what torch does with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
F = torch.nn.functional
gated = pytest.importorskip("dispatch.torch.gated")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F64 = torch.float64
DTYPES = (F64, torch.float32, torch.float16, torch.bfloat16)
THEIRS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
}


def operands(shape=(3, 7), dtype=F64):
    torch.manual_seed(0)
    return [(torch.randn(shape, dtype=F64) * size).to(dtype).requires_grad_() for size in (3, 1)]


def test_the_modes_are_those():
    assert set(THEIRS) == set(gated.MODES)


@pytest.mark.parametrize("shape", [(), (1,), (3, 7), (2, 5, 64), (0, 4), (2, 3, 1, 5, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", THEIRS)
def test_values_and_gradients_against_f64(mode, dtype, shape):
    given = operands(shape, dtype)
    wide = beside.mapped_to_f64(given)
    y, expected = gated.gated_activation(*given, mode), THEIRS[mode](wide[0]) * wide[1]
    assert y.dtype == dtype
    found, wanted = beside.gradients(y, given), beside.gradients(expected, wide)
    beside.close([y, *found], [expected, *wanted], 16 * torch.finfo(dtype).eps)  # in f64 torch's own cancels


@pytest.mark.parametrize("mode", THEIRS)
def test_it_is_no_further_from_f64_than_torch(mode):
    gate, up = (t.detach() for t in operands((64, 96), torch.bfloat16))
    exact = THEIRS[mode](gate.double()) * up.double()
    ours, other = (y.double() - exact for y in (gated.gated_activation(gate, up, mode), THEIRS[mode](gate) * up))
    assert ours.norm() <= other.norm()
    assert ours.abs().max() <= other.abs().max()


def test_halves_of_one_tensor_and_other_strides():
    torch.manual_seed(0)
    whole = torch.randn(4, 5, 24, dtype=F64)
    gate, up = whole.chunk(2, -1)
    for one, other in ((gate, up), (gate.transpose(0, 1), up.transpose(0, 1)), (gate, up[:1].expand(4, 5, 12))):
        y = gated.gated_activation(one, other)
        beside.close([y], [F.silu(one) * other], 1e-14)
    assert gated.gated_activation(gate, up).is_contiguous()
    assert gated.gated_activation(gate.transpose(0, 1), up.transpose(0, 1)).transpose(0, 1).is_contiguous()
    whole.requires_grad_()
    (found,) = beside.gradients(gated.gated_activation(*whole.chunk(2, -1)), [whole])
    (expected,) = beside.gradients(F.silu(whole[..., :12]) * whole[..., 12:], [whole])
    beside.close([found], [expected], 1e-14)


@pytest.mark.parametrize("dtype", beside.first_of(DTYPES), ids=str)
def test_opcheck(dtype):
    gate, up = operands((4, 6), dtype)
    for one, mode in ((gate, "silu"), (gate.detach().T.contiguous().T.requires_grad_(), "gelu")):
        torch.library.opcheck(gated.GATED.overload, (one, up, mode))
        detached = (one.detach(), up.detach(), torch.randn_like(up), mode)
        torch.library.opcheck(gated.GATED_BACKWARD.overload, detached)


@pytest.mark.parametrize("mode", THEIRS)
def test_gradcheck(mode):
    assert torch.autograd.gradcheck(lambda *t: gated.gated_activation(*t, mode), operands())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_and_export(dynamic):
    torch.compiler.reset()

    class Gate(torch.nn.Module):
        def forward(self, gate, up):
            return gated.gated_activation(gate * 2, up, "gelu") + 1

    model = Gate()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        given = operands((rows, 8))
        y, expected = compiled(*given), model(*given)
        beside.close([y, *beside.gradients(y, given)], [expected, *beside.gradients(expected, given)], 1e-14)
    exported = torch.export.export(model, tuple(given))
    beside.close([exported.module()(*given)], [expected], 1e-14)


def test_vmap_over_either_or_both():
    gate, up = (t.detach() for t in operands((4, 5, 6)))
    expected = F.silu(gate) * up
    beside.close([torch.vmap(gated.gated_activation)(gate, up)], [expected], 1e-14)
    beside.close([torch.vmap(gated.gated_activation, in_dims=1, out_dims=1)(gate, up)], [expected], 1e-14)
    beside.close([torch.vmap(gated.gated_activation, in_dims=(0, None))(gate, up[0])], [F.silu(gate) * up[0]], 1e-14)


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((X.long(), X), "gate: got a tensor of torch.int64"),
        ((X, X.half()), "up: got a tensor of torch.float16; expected torch.float32, the dtype of gate"),
        ((X, X[:1]), r"up: got shape \(1, 3\); expected \(2, 3\), the shape of gate"),
        ((X, X, "tanh"), "mode: got 'tanh'; expected one of silu, gelu, gelu_tanh, relu, sigmoid"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, text):
    with pytest.raises(BadRequest, match=text):
        gated.gated_activation(*given)
