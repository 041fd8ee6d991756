"""`dispatch.torch.linear` beside torch's own: values, gradients, transformations, layouts, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
F = torch.nn.functional
linear = pytest.importorskip("dispatch.torch").linear
products = pytest.importorskip("dispatch.torch.products")

ACTIVATIONS = (None, "relu", "gelu")
F64 = torch.float64


def theirs(x, weight, bias=None, activation=None):
    y = F.linear(x, weight, bias)
    return {None: lambda t: t, "relu": F.relu, "gelu": lambda t: F.gelu(t, approximate="tanh")}[activation](y)


def operands(*shape, out=4, bias=True, dtype=F64, grad=True, seed=0):
    torch.manual_seed(seed)
    made = [torch.randn(shape, dtype=dtype), torch.randn(out, shape[-1], dtype=dtype)]
    made += [torch.randn(out, dtype=dtype)] if bias else []
    return [t.requires_grad_(grad) for t in made]


def gradients(y, given):
    torch.manual_seed(1)
    return torch.autograd.grad(y, given, torch.randn(y.shape, dtype=y.dtype))


def close(ours, others, tolerance):
    assert len(ours) == len(others)
    for one, other in zip(ours, others, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# -- values and gradients ---------------------------------------------------------------------------------------------
SHAPES = ((5, 7), (7,), (2, 3, 7), (0, 7), (2, 0, 7), (1, 7), (3, 1, 2, 1), (17, 33), (1, 1), (5, 0), (0, 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_torch(shape, bias, activation):
    for out in (0, 1, 4, 19):
        given = operands(*shape, out=out, bias=bias)
        y, expected = linear(*given, activation=activation), theirs(*given, activation=activation)
        close([y, *gradients(y, given)], [expected, *gradients(expected, given)], 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (1, 1, 16)], ids=str)
def test_gradcheck_of_one_row(shape, dtype, monkeypatch):
    """On a GPU, too: no product of cuBLASLt sums up the columns of one row."""
    epilogues, matmul = [], products.matmul
    monkeypatch.setattr(products, "matmul", lambda *given, **named: epilogues.append(named) or matmul(*given, **named))
    given = operands(*shape, out=16, dtype=dtype)
    y, expected = linear(*given), theirs(*given)
    close([y, *gradients(y, given)], [expected, *gradients(expected, given)], 2e-2)
    assert epilogues
    assert not any("bgrad" in named for named in epilogues)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_narrow_dtypes_against_f64(dtype, activation):
    given = operands(3, 21, 40, out=24, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in given]
    y, expected = linear(*given, activation=activation), theirs(*wide, activation=activation)
    ours, exact = [y, *gradients(y, given)], [expected]
    torch.manual_seed(1)
    exact += torch.autograd.grad(expected, wide, torch.randn(y.shape, dtype=dtype).double())
    step = torch.finfo(dtype).eps
    for one, other in zip(ours, exact, strict=True):
        assert one.dtype == dtype
        # A gradient is rounded before its product sums 63 of it: as many roundings as there are terms, at random.
        bound = 8 * step * max(1.0, other.abs().max().item())
        assert (one.double() - other).abs().max().item() <= bound


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_operands_that_lie_otherwise(activation):
    """Transposed, with gaps, read again and again, and at addresses that are no multiple of 16."""
    torch.manual_seed(2)
    transposed = torch.randn(7, 6, dtype=F64).T
    gaps = torch.randn(6, 14, dtype=F64)[:, ::2]
    again = torch.randn(1, 7, dtype=F64).expand(6, 7)
    middle = torch.randn(3, 2, 5, 7, dtype=F64).transpose(0, 2)
    apart = torch.randn(6 * 7 + 1, dtype=F64)[1:].view(6, 7)
    for x in (transposed, gaps, again, middle, apart):
        for weight in (
            torch.randn(7, 4, dtype=F64).T,
            torch.randn(8, 7, dtype=F64)[::2],
            torch.randn(4, 14).double()[:, ::2],
        ):
            bias = torch.randn(9, dtype=F64)[1::2]
            given = [t.detach().requires_grad_() for t in (x, weight, bias)]
            y, expected = linear(*given, activation=activation), theirs(*given, activation=activation)
            close([y, *gradients(y, given)], [expected, *gradients(expected, given)], 1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gradient_that_is_not_dense(activation):
    given = operands(6, 7)
    for dy in (
        torch.ones(1, 1, dtype=F64).expand(6, 4),
        torch.randn(4, 6, dtype=F64).T,
        torch.randn(12, 8).double()[::2, ::2],
    ):
        ours = torch.autograd.grad(linear(*given, activation=activation), given, dy)
        close(ours, torch.autograd.grad(theirs(*given, activation=activation), given, dy), 1e-12)


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
def test_only_the_gradients_that_are_asked_for(needed):
    for activation in ACTIVATIONS:
        given = operands(5, 7, grad=False)
        wanted = [given[n].requires_grad_() for n in needed]
        ours, expected = linear(*given, activation=activation), theirs(*given, activation=activation)
        close(gradients(ours, wanted), gradients(expected, wanted), 1e-12)
        for t in given:
            t.requires_grad_(False)


def test_the_slope_of_a_relu_at_0_is_0():
    x = torch.zeros(2, 3, dtype=F64, requires_grad=True)
    (dx,) = torch.autograd.grad(linear(x, torch.ones(2, 3, dtype=F64), activation="relu").sum(), x)
    assert not dx.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck(activation, bias):
    given = operands(2, 3, 5, bias=bias)
    assert torch.autograd.gradcheck(lambda *t: linear(*t, activation=activation), given)


# -- what torch does with it ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("dtype", [F64, pytest.param(torch.bfloat16, marks=pytest.mark.exhaustive)], ids=str)
def test_opcheck(activation, dtype):
    for bias in (True, False):
        given = operands(2, 3, 7, bias=bias, dtype=dtype)
        filled = [*given, None][:3]
        for keep in {False, activation == "gelu"}:
            torch.library.opcheck(products.LINEAR.overload, (*filled, activation, keep))
        x, weight = (t.detach() for t in given[:2])
        saved = None if activation == "none" else torch.randn(6, 4, dtype=dtype)
        dy = torch.randn(2, 3, 4, dtype=dtype)
        for needs in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
            torch.library.opcheck(products.LINEAR_BACKWARD.overload, (dy, x, weight, saved, activation, *needs))


class Mlp(torch.nn.Module):
    def __init__(self, function, dtype=F64):
        super().__init__()
        self.first = torch.nn.Linear(7, 12, dtype=dtype)
        self.second = torch.nn.Linear(12, 9, dtype=dtype)
        self.third = torch.nn.Linear(9, 3, dtype=dtype)
        self.function = function

    def forward(self, x):
        x = self.function(x, self.first.weight, self.first.bias, "gelu")
        x = self.function(x, self.second.weight, self.second.bias, "relu")
        return self.function(x, self.third.weight, self.third.bias)


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.compiles)]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of inductor's own imports
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(backend, dynamic):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a compiler")
    torch.compiler.reset()
    model = Mlp(linear)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (5, 8, 3):
        x = torch.randn(rows, 7, dtype=F64, requires_grad=True)
        ours, expected = compiled(x), model(x)
        given = [x, *model.parameters()]
        close([ours, *gradients(ours, given)], [expected, *gradients(expected, given)], 1e-12)
        with torch.no_grad():
            close([compiled(x)], [expected], 1e-12)


def test_export():
    model, x = Mlp(linear), torch.randn(5, 7, dtype=F64)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    assert "dispatch.linear" in str(exported.graph)
    other = torch.randn(11, 7, dtype=F64)
    close([exported.module()(other)], [model(other)], 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    given = operands(5, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        y, expected = linear(*given, activation="gelu"), theirs(*given, activation="gelu")
    assert y.dtype == expected.dtype == dtype
    ours, others = [y, *gradients(y, given)], [expected, *gradients(expected, given)]
    close(ours, others, 8 * torch.finfo(dtype).eps)
    assert all(grad.dtype == torch.float32 for grad in ours[1:])
    with torch.autocast("cpu", dtype):
        assert linear(*operands(5, 8)).dtype == F64, "f64 stays, as in torch"


def test_vmap_of_x_alone():
    x, weight, bias = operands(6, 5, 7, grad=False)
    for activation in ACTIVATIONS:
        mapped = torch.vmap(lambda t, a=activation: linear(t, weight, bias, a), in_dims=1)(x)
        close([mapped], [theirs(x.movedim(1, 0), weight, bias, activation)], 1e-12)
        weight.requires_grad_()
        mapped = torch.vmap(lambda t, a=activation: linear(t, weight, bias, a))(x)
        expected = theirs(x, weight, bias, activation)
        close(gradients(mapped, [weight]), gradients(expected, [weight]), 1e-12)
        weight.requires_grad_(False)


def test_vmap_of_weights_is_refused():
    x, weights = torch.randn(2, 7, dtype=F64), torch.randn(3, 4, 7, dtype=F64)
    with pytest.raises(BadRequest, match="vmap over dispatch::linear"):
        torch.vmap(lambda w: linear(x, w))(weights)


def test_transformations_of_torch_func_are_refused():
    """By torch itself, for every custom op that has a gradient."""
    x, weight = (t.detach() for t in operands(5, 7, bias=False))
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(lambda w: linear(x, w).sum())(weight)


def test_a_gradient_of_the_gradient_is_refused():
    given = operands(5, 7)
    (dx,) = torch.autograd.grad(linear(*given, activation="relu").sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()


def test_a_training_loop_has_the_losses_of_torch():
    def losses(function):
        torch.manual_seed(3)
        model = Mlp(function)
        inputs, targets = torch.randn(64, 7, dtype=F64), torch.randint(0, 3, (64,))
        optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    ours, expected = losses(linear), losses(theirs)
    assert expected[-1] < expected[0] * 0.9
    assert max(abs(one - other) for one, other in zip(ours, expected, strict=True)) < 1e-9


# -- what is refused --------------------------------------------------------------------------------------------------
REFUSED = [
    (lambda: linear([1.0], torch.ones(2, 1)), "x: got a list"),
    (lambda: linear(torch.ones(2, 3, dtype=torch.int8), torch.ones(2, 3)), "x: got a tensor of torch.int8"),
    (lambda: linear(torch.ones(2, 3), torch.ones(2, 3, dtype=F64)), "weight: got a tensor of torch.float64"),
    (lambda: linear(torch.ones(2, 3), torch.ones(3, 2)), r"weight: got shape \(3, 2\); expected \(out, 3\)"),
    (lambda: linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), r"bias: got shape \(3,\); expected \(4,\)"),
    (lambda: linear(torch.ones(2, 3), torch.ones(4, 3), None, "tanh"), "activation: got 'tanh'; expected None"),
    (lambda: linear(torch.tensor(1.0), torch.ones(4, 3)), "x: got a tensor without axes"),
    (lambda: linear(torch.ones(2, 3), torch.ones(4, 3, device="meta")), "weight: got a tensor on meta"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit_is_refused_by_name(number):
    call, text = REFUSED[number]
    with pytest.raises(BadRequest, match=text):
        call()


def test_a_meta_tensor_gives_one():
    y = linear(torch.ones(2, 3, device="meta"), torch.ones(4, 3, device="meta"))
    assert y.shape == (2, 4)
    assert y.is_meta


def test_it_is_imported_on_demand_alone():
    lines = (
        "import sys, dispatch; assert 'torch' not in sys.modules and not hasattr(dispatch, 'torch')",
        "from dispatch.torch import linear; import torch",
        "assert torch.nn is sys.modules['torch.nn'] and dispatch.torch.linear is linear",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
