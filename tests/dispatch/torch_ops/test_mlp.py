"""`dispatch.torch.mlp` beside two linear layers of torch's: values, gradients, transformations, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
F = torch.nn.functional
mlps = pytest.importorskip("dispatch.torch.mlps")
mlp = mlps.mlp
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F64 = torch.float64
ACTIVATIONS = ("relu", "gelu")
BIASES = ((True, True), (True, False), (False, True), (False, False))


def theirs(x, weight1, bias1, weight2, bias2=None, activation="gelu"):
    h = F.linear(x, weight1, bias1)
    h = F.relu(h) if activation == "relu" else F.gelu(h, approximate="tanh")
    return F.linear(h, weight2, bias2)


def operands(*shape, hidden=12, out=3, biases=(True, True), dtype=F64, grad=True):
    torch.manual_seed(0)
    shapes = (
        shape,
        (hidden, shape[-1]),
        (hidden,) if biases[0] else None,
        (out, hidden),
        (out,) if biases[1] else None,
    )
    return [None if s is None else torch.randn(s, dtype=dtype).requires_grad_(grad) for s in shapes]


def some(given):
    return [t for t in given if t is not None]


def agree(given, activation, tolerance=1e-12):
    y, expected = mlp(*given, activation), theirs(*given, activation)
    ours, others = beside.gradients(y, some(given)), beside.gradients(expected, some(given))
    beside.close([y, *ours], [expected, *others], tolerance)


SHAPES = ((5, 7), (7,), (2, 3, 7), (0, 7), (2, 0, 7), (130, 9), (3, 1, 2, 1), (1, 1), (5, 0), (0, 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biases", BIASES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch(shape, biases, activation):
    for hidden, out in ((12, 3), (1, 1), (130, 5), (0, 4), (4, 0)):
        agree(operands(*shape, hidden=hidden, out=out, biases=biases), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_against_f64(dtype, activation):
    given = [t.detach() * 0.25 for t in operands(3, 21, 40, hidden=24, out=17, dtype=dtype)]
    given = [t.requires_grad_() for t in given]
    wide = beside.mapped_to_f64(given)
    y, expected = mlp(*given, activation), theirs(*wide, activation)
    ours, others = beside.gradients(y, given), beside.gradients(expected, wide)
    for one, other in zip([y, *ours], [expected, *others], strict=True):
        assert one.dtype == dtype
        # Each product's operands are rounded once or twice before it sums up to 63 terms, at random.
        bound = 16 * torch.finfo(dtype).eps * max(1.0, other.abs().max().item())
        assert (one.double() - other).abs().max().item() <= bound


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_operands_that_lie_otherwise(activation):
    torch.manual_seed(2)
    for x in (
        torch.randn(7, 6, dtype=F64).T,
        torch.randn(6, 14, dtype=F64)[:, ::2],
        torch.randn(1, 7, dtype=F64).expand(6, 7),
        torch.randn(6 * 7 + 1, dtype=F64)[1:].view(6, 7),
    ):
        weight1, weight2 = torch.randn(7, 12, dtype=F64).T, torch.randn(6, 24, dtype=F64)[::2, ::2]
        bias = torch.randn(25, dtype=F64)[1::2]
        agree([t.detach().requires_grad_() for t in (x, weight1, bias, weight2, bias[:3])], activation)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (3, 4), (2, 4)], ids=str)
def test_only_the_gradients_that_are_asked_for(needed):
    for activation in ACTIVATIONS:
        given = operands(5, 7, grad=False)
        wanted = [given[n].requires_grad_() for n in needed]
        ours, expected = mlp(*given, activation), theirs(*given, activation)
        beside.close(beside.gradients(ours, wanted), beside.gradients(expected, wanted), 1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biases", BIASES, ids=str)
def test_gradcheck(activation, biases):
    given = operands(2, 3, 5, biases=biases)
    assert torch.autograd.gradcheck(lambda *t: mlp(*t, activation), given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", beside.first_of([F64, torch.bfloat16]), ids=str)
def test_opcheck(activation, dtype):
    for biases in BIASES[::3]:
        given = operands(2, 3, 7, biases=biases, dtype=dtype)
        for keep in (False, True):
            torch.library.opcheck(mlps.MLP.overload, (*given, activation, keep))
        x, weight1, bias1, weight2, bias2 = (t if t is None else t.detach() for t in given)
        _, hidden, slopes = mlps.MLP(x, weight1, bias1, weight2, bias2, activation, True)
        dy = torch.randn(2, 3, 3, dtype=dtype)
        for needs in ([True] * 5, [True, False, False, False, True], [False, False, True, True, False]):
            arguments = (dy, x, weight1, weight2, hidden, slopes, activation, needs)
            torch.library.opcheck(mlps.MLP_BACKWARD.overload, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compile(dynamic, activation):
    torch.compiler.reset()
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for rows in (5, 8, 3):
        given = operands(rows, 7)
        y, expected = compiled(*given, activation), mlp(*given, activation)
        ours, others = beside.gradients(y, given), beside.gradients(expected, given)
        beside.close([y, *ours], [expected, *others], 1e-12)
        with torch.no_grad():
            beside.close([compiled(*given, activation)], [expected], 1e-12)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, *given):
            return mlp(*given)

    given = operands(5, 7, grad=False)
    exported = torch.export.export(Model(), tuple(given))
    assert "dispatch.mlp" in str(exported.graph)
    beside.close([exported.module()(*given)], [mlp(*given)], 0)


def test_autocast():
    given = operands(5, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(*given)
    assert y.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in beside.gradients(y, given))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_vmap_of_x_alone(activation):
    x, *others = operands(6, 5, 7, grad=False)
    others[0].requires_grad_()
    mapped = torch.vmap(lambda t: mlp(t, *others, activation))(x)
    expected = theirs(x, *others, activation)
    ours, theirs_ = beside.gradients(mapped, others[:1]), beside.gradients(expected, others[:1])
    beside.close([mapped, *ours], [expected, *theirs_], 1e-12)


def test_a_gradient_of_the_gradient_is_refused():
    given = operands(5, 7)
    (dx,) = torch.autograd.grad(mlp(*given).sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


def test_what_does_not_fit_is_refused_by_name():
    x, weight1, bias1, weight2, bias2 = operands(5, 7, grad=False)
    for call, text in (
        (lambda: mlp(x, weight1, bias1, weight2, bias2, "tanh"), "activation: got 'tanh'"),
        (lambda: mlp(x, weight1, bias1, weight2.T, bias2), r"weight2: got shape \(12, 3\); expected \(…, 12\)"),
        (lambda: mlp(x, weight1.T, bias1, weight2, bias2), r"weight1: got shape \(7, 12\)"),
        (lambda: mlp(x, weight1, bias2, weight2, bias2), r"bias1: got shape \(3,\); expected \(12,\)"),
        (lambda: mlp(x, weight1, bias1, weight2, bias1), r"bias2: got shape \(12,\); expected \(3,\)"),
        (lambda: mlp(x, weight1, bias1, None), "weight2: got a NoneType"),
        (lambda: mlp(x, weight1.float(), bias1, weight2), "weight1: got a tensor of torch.float32"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
