"""`dispatch.torch.tree_linear` beside the same in f64, what torch does with it, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch import evt
from dispatch.errors import BadRequest, NoRow

torch = pytest.importorskip("torch")
F = torch.nn.functional
trees = pytest.importorskip("dispatch.torch.trees")
tree_linear = trees.tree_linear
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

DTYPES = (torch.float16, torch.bfloat16)
SHAPES = ((5, 16), (16,), (2, 3, 16), (5, 7), (1, 1), (3, 1, 2, 33))


def gated(product, bias, gate, scale, other):
    return evt.silu(product * scale + bias) * gate - other


def exactly(x, weight, bias, gate, scale, other):
    y = x.double() @ weight.double().T
    return F.silu(y * float(scale) + bias.double()) * gate.double() - other.double()


def operands(*shape, out=24, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(out, shape[-1], dtype=dtype)
    lead = shape[:-1]
    leaves = {
        "bias": torch.randn(out, dtype=dtype),
        "gate": torch.randn(*lead, out, dtype=dtype),
        "scale": 0.25,
        "other": torch.randn(*lead, 1),
    }
    return x, weight, leaves


def close(y, expected):
    tolerance = 4 * torch.finfo(y.dtype).eps * max(1.0, expected.abs().max().item())
    assert y.shape == expected.shape
    assert (y.double() - expected).abs().max().item() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_function_of_the_product(shape, dtype):
    for out in (24, 5, 1):
        x, weight, leaves = operands(*shape, out=out, dtype=dtype)
        for scale in (0.25, torch.tensor([0.25])):
            leaves["scale"] = scale
            y = tree_linear(x, weight, gated, **leaves)
            assert y.dtype == dtype
            assert y.is_contiguous()
            close(y, exactly(x, weight, **leaves))
        close(tree_linear(x, weight, gated, out_dtype=torch.float32, **leaves), exactly(x, weight, **leaves))


def test_operands_that_lie_otherwise():
    x, weight, leaves = operands(6, 16)
    expected = exactly(x, weight, **leaves)
    leaves["gate"] = leaves["gate"].T.contiguous().T
    leaves["bias"] = leaves["bias"].repeat_interleave(2)[::2]
    leaves["other"] = torch.cat((leaves["other"], leaves["other"]), 1)[:, 1:]
    for a in (x.T.contiguous().T, torch.cat((x, x), 1)[:, 16:], torch.cat((x[:, :1], x), 1)[:, 1:]):
        for b in (weight.T.contiguous().T, torch.cat((weight[:, :3], weight), 1)[:, 3:]):
            close(tree_linear(a, b, gated, **leaves), expected)


def test_what_a_tree_stores_and_reduces():
    x, weight, _ = operands(2, 5, 16)
    z = evt.store(evt.accumulator(), "before", "f32")
    tree = evt.reduce(evt.reduce(evt.amax(evt.relu(z), "top"), "rows", "sum", over="n"), "columns", "max", over="m")
    found = tree_linear(x, weight, tree)
    exact = x.double() @ weight.double().T
    wanted = {
        "out": exact.relu(),
        "before": exact,
        "top": exact.relu().max(),
        "rows": exact.relu().sum(-1),
        "columns": exact.relu().flatten(0, 1).amax(0),
    }
    names = [name for name, _, _ in trees._outputs(tree, (2, 5, 24), x.dtype)]
    assert set(names) == set(wanted)
    for name, one in zip(names, found, strict=True):
        assert one.dtype == (torch.bfloat16 if name == "out" else torch.float32)
        close(one if name == "out" else one.bfloat16(), wanted[name])


def test_trees_that_have_a_name_take_wide_dtypes():
    for dtype in (torch.float64, torch.float32):
        x, weight, leaves = operands(5, 16, dtype=dtype)
        y = tree_linear(x, weight, lambda product, bias: evt.relu(product + bias), bias=leaves["bias"])
        torch.testing.assert_close(y, F.relu(F.linear(x, weight, leaves["bias"])))
    x, weight, _ = operands(5, 16, dtype=torch.float32)
    y = tree_linear(x, weight, evt.silu, compute="tf32")
    torch.testing.assert_close(y, F.silu(x @ weight.T), rtol=2e-3, atol=2e-2)
    with pytest.raises(NoRow):
        tree_linear(x, weight, evt.silu)


def test_a_tree_as_text():
    x = evt.clamp(evt.fma(evt.col("side"), evt.accumulator(), evt.load("g")), -1.5, 2)
    tree = evt.quantize(evt.store(evt.tanh(x) + 1e-30, "kept", "bf16"), evt.row("scale"))
    assert trees._parse(trees._serialize(tree)) == tree


@pytest.mark.parametrize("dtype", beside.first_of(DTYPES), ids=str)
def test_opcheck(dtype):
    x, weight, leaves = operands(2, 5, 16, dtype=dtype)
    nodes = {"bias": evt.row("bias"), "gate": evt.load("gate"), "scale": evt.scalar("scale"), "other": evt.col("other")}
    text = trees._serialize(evt.amax(gated(evt.accumulator(), **nodes), "top"))
    tensors = [leaves[name] for name in ("bias", "gate", "other")]
    names = ["row bias", "load gate", "col other", "number scale"]
    torch.library.opcheck(trees.TREE.overload, (x, weight, tensors, [0.25], names, text, dtype, None))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    if dynamic and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip("Dynamo of torch 2.11 refuses a tree's constants where it makes numbers dynamic: it has no repr")
    torch.compiler.reset()
    compiled = torch.compile(tree_linear, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 8):
        x, weight, leaves = operands(rows, 16)
        assert torch.equal(compiled(x, weight, gated, **leaves), tree_linear(x, weight, gated, **leaves))


def test_export():
    class Model(torch.nn.Module):
        def forward(self, x, weight, bias, gate, other):
            return tree_linear(x, weight, gated, bias=bias, gate=gate, scale=0.25, other=other)

    x, weight, leaves = operands(5, 16)
    given = (x, weight, *(leaves[name] for name in ("bias", "gate", "other")))
    exported = torch.export.export(Model(), given)
    assert "dispatch.tree_linear" in str(exported.graph)
    assert torch.equal(exported.module()(*given), tree_linear(x, weight, gated, **leaves))


def test_autocast():
    x, weight, leaves = operands(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = tree_linear(x.float(), weight.float(), gated, **leaves)
    assert torch.equal(y, tree_linear(x, weight, gated, **leaves))


@pytest.mark.parametrize("which", ["x", "weight", "gate"])
def test_a_gradient_is_refused(which):
    x, weight, leaves = operands(5, 16)
    {"x": x, "weight": weight, **leaves}[which].requires_grad_()
    y = tree_linear(x, weight, gated, **leaves)
    assert y.requires_grad
    with pytest.raises(BadRequest, match="no backward pass: a tree has no gradient"):
        y.sum().backward()
    with torch.no_grad():
        assert not tree_linear(x, weight, gated, **leaves).requires_grad


def test_what_does_not_fit_is_refused_by_name():
    x, weight, leaves = operands(5, 16)
    for call, text in (
        (lambda: tree_linear(x, weight.T, gated, **leaves), r"weight: got shape \(16, 24\)"),
        (
            lambda: tree_linear(x, weight, gated, **{**leaves, "bias": x}),
            r"bias: got shape \(5, 16\); expected \(24,\)",
        ),
        (lambda: tree_linear(x, weight, gated, **{**leaves, "scale": "1"}), "scale: got a str"),
        (lambda: tree_linear(x, weight, "relu"), "tree: got a str"),
        (lambda: tree_linear(x, weight, lambda _: 1.0), "tree: got a function that returns a float"),
        (lambda: tree_linear(x, weight, evt.silu(evt.row("given"))), "operands.*got nothing; expected the row"),
        (lambda: tree_linear(x, weight, evt.silu(evt.accumulator()), more=x[0, :1]), "operands.*expected one of none"),
        (lambda: tree_linear(x, weight.float(), gated, **leaves), "weight: got a tensor of torch.float32"),
        (lambda: tree_linear(x, weight, gated, out_dtype="f32", **leaves), "out_dtype: got 'f32'"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
