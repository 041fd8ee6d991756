"""Forward-mode AD is refused, compiled or not: torch takes the tangent of a custom op for 0, without a word."""

import pytest

torch = pytest.importorskip("torch")
from torch.autograd import forward_ad  # noqa: E402

import dispatch.torch as dt  # noqa: E402

# torch's own, from its way to forward-mode AD.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
W, G = torch.ones(6, 8), torch.ones(8)
CALLS = {
    "linear": lambda x: dt.linear(x, W),
    "mlp": lambda x: dt.mlp(x, W, None, torch.ones(3, 6), None, "relu"),
    "norm": lambda x: dt.rms_norm(x, (8,), G),
    "gated_activation": lambda x: dt.gated_activation(x, x * 2),
    "conv2d": lambda x: dt.conv2d(x.view(1, 2, 4, 4), torch.ones(2, 2, 3, 3), None),
    "attention": lambda x: dt.scaled_dot_product_attention(*[x.to(torch.bfloat16).view(1, 1, 4, 8)] * 3),
}


def jvp(call):
    return lambda x: torch.func.jvp(call, (x,), (torch.ones_like(x),))


def dual(call):
    def within(x):
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(x, torch.ones_like(x)))

    return within


WAYS = {
    "jvp": jvp,
    "dual": dual,
    "compiled jvp": lambda call: torch.compile(jvp(call), backend="aot_eager", fullgraph=True),
    "jvp of compiled": lambda call: jvp(torch.compile(call, backend="aot_eager")),
    "dual of compiled": lambda call: dual(torch.compile(call, backend="aot_eager")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_refused_by_the_ops_name_and_with_what_to_do(name, way):
    torch.compiler.reset()
    with pytest.raises(
        Exception, match=rf"dispatch::{name}: got .*forward-mode AD.* torch.autograd.grad uses reverse mode"
    ):
        WAYS[way](CALLS[name])(torch.randn(4, 8))


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_that_was_compiled_before_refuses_them_too(name):
    torch.compiler.reset()
    x, compiled = torch.randn(4, 8), torch.compile(CALLS[name], backend="aot_eager")
    expected = compiled(x)
    with pytest.raises(Exception, match=rf"dispatch::{name}: got .*forward-mode AD"), torch.no_grad():
        dual(compiled)(x)
    torch.testing.assert_close(compiled(x), expected)


def test_what_has_no_tangent_is_computed_where_others_have_one():
    x = torch.randn(4, 8)
    with forward_ad.dual_level():
        torch.testing.assert_close(dt.linear(x, W), x @ W.T)
    value, tangent = torch.func.jvp(lambda y: dt.linear(x, W).sum() * y, (torch.ones(()),), (torch.ones(()),))
    torch.testing.assert_close(value, tangent)
