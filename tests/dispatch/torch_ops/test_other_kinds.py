"""Tensors other than plain strided ones: ops refuse them by the operand's name, fused models leave them to torch."""

from __future__ import annotations

import copy

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
ops = pytest.importorskip("dispatch.torch")
nn, F = torch.nn, torch.nn.functional

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*nested:UserWarning", "ignore:Sparse:UserWarning", "ignore:`torch.jit:DeprecationWarning"
)


class Subclass(torch.Tensor):
    """A class of a user's, such as torchvision's images have."""


def nested(x):
    return torch.nested.nested_tensor([x, x])


KINDS = {
    "COO": torch.Tensor.to_sparse,
    "CSR": torch.Tensor.to_sparse_csr,
    "nested": nested,
    "Subclass": lambda x: x.as_subclass(Subclass),
    "mkldnn": torch.Tensor.to_mkldnn,
}
WIDTH = 8
PLAIN, FEW = torch.ones(4, WIDTH), torch.ones(WIDTH)
OPS = {
    ("linear", "x"): lambda x: ops.linear(x, PLAIN),
    ("linear", "weight"): lambda x: ops.linear(PLAIN, x),
    ("mlp", "x"): lambda x: ops.mlp(x, PLAIN, None, PLAIN[:, :4], None, "relu"),
    ("mlp", "weight2"): lambda x: ops.mlp(PLAIN, PLAIN, None, x),
    ("layer_norm", "x"): lambda x: ops.layer_norm(x, (WIDTH,)),
    ("rms_norm", "x"): lambda x: ops.rms_norm(x, (WIDTH,)),
    ("gated_activation", "gate"): lambda x: ops.gated_activation(x, PLAIN),
    ("gated_activation", "up"): lambda x: ops.gated_activation(PLAIN, x),
    ("conv2d", "weight"): lambda x: ops.conv2d(torch.ones(1, 1, 4, 4), x),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "operand"), OPS)
def test_an_op_refuses_it_by_name(op, operand, kind):
    with pytest.raises(BadRequest, match=f"(?i)^{operand}: got a .*{kind}.* Hint: ") as refused:
        OPS[op, operand](KINDS[kind](PLAIN).requires_grad_(kind != "nested"))
    assert refused.value.operand == operand


def test_an_unsupported_layout_is_refused_before_anything_is_allocated():
    """torch 2.11 writes beyond the memory of x.new_zeros(…, dtype=torch.uint8) of an mkldnn tensor."""
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    for _ in range(20):
        with pytest.raises(BadRequest, match=r"^x: got a tensor of layout torch\._mkldnn"):
            ops.mlp(PLAIN.to_mkldnn(), weight, None, weight, None, "relu")


class Gate(nn.Module):
    def forward(self, gate, up):
        return F.silu(gate) * up


class Attention(nn.Module):
    def forward(self, query):
        return F.scaled_dot_product_attention(query, query, query)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4))


def pair(model):
    """The model, and a copy of it that is fused."""
    fused = copy.deepcopy(model)
    assert ops.fuse(fused, linears=True).replaced
    return model, fused


@pytest.mark.parametrize("kind", ["COO", "nested", "Subclass"])
def test_a_fused_model_leaves_it_to_torch(kind):
    model, fused = pair(layers())
    x = KINDS[kind](torch.rand(3, WIDTH))
    expected, y = model(x), fused(x)
    assert type(y) is type(expected)
    for one, other in zip(y.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["nested", "Subclass"])
def test_fused_gates_and_attention_leave_it_to_torch(kind):
    x = torch.rand(2, 3, WIDTH)
    for (model, fused), args in ((pair(Gate()), 2), (pair(Attention()), 1)):
        given = KINDS[kind](x.half()) if args == 1 else KINDS[kind](x)
        given = given if kind == "nested" or args == 2 else given[None]
        expected, y = model(*[given] * args), fused(*[given] * args)
        assert type(y) is type(expected)
        for one, other in zip(y.unbind(), expected.unbind(), strict=True):
            assert torch.equal(one, other)


def test_a_fused_model_is_transformed_as_before():
    """Gradients of each sample, ensembles and directional derivatives by torch.func."""
    func = torch.func
    model, fused = pair(layers().double())
    weights, x = dict(model.named_parameters()), torch.rand(5, WIDTH, dtype=torch.float64)
    both = {name: torch.stack((t, 2 * t)) for name, t in model.state_dict().items()}

    def results(module):
        def loss(weights, one):
            return func.functional_call(module, weights, (one,)).square().sum()

        yield from func.vmap(func.grad(loss), (None, 0))(weights, x).values()
        yield func.vmap(lambda weights: func.functional_call(module, weights, (x,)))(both)
        yield from func.jvp(module, (x,), (x + 1,))
        yield func.jacrev(module)(x[0])

    for one, other in zip(results(fused), results(model), strict=True):
        torch.testing.assert_close(one, other)
