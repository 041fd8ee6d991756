"""`dispatch.torch.fuse`: what it replaces, what not and why; numbers, weights and state stay what they were."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fuse = pytest.importorskip("dispatch.torch").fuse
fused = pytest.importorskip("dispatch.torch.fused")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F64 = torch.float64
TANH = {"approximate": "tanh"}


class Block(nn.Module):
    """A transformer's block, with its products written in several ways."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gate = nn.Linear(width, width, bias=False)

    def split(self, x):
        b, s, w = x.shape
        return x.view(b, s, self.heads, w // self.heads).transpose(1, 2)

    def attend(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        attended = F.scaled_dot_product_attention(self.split(q), self.split(k), self.split(v), is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        x = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        x = x + torch.relu(self.gate(x))
        return F.layer_norm(x, (x.shape[-1],))


def mlp(dtype=F64):
    torch.manual_seed(0)
    layers = (nn.Linear(7, 12), nn.GELU(**TANH), nn.Linear(12, 9), nn.ReLU(inplace=True), nn.Linear(9, 3))
    return nn.Sequential(*layers).to(dtype)


def convnet(dtype=F64):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.ReLU())
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 5)).to(dtype)


def whats(notes):
    return [note.what for note in notes]


def agree(model, x, tolerance):
    """Values and gradients before and after; the report of `fuse`."""
    before = model(x)
    expected = [before, *beside.gradients(before, list(model.parameters()))]
    report = fuse(model)
    after = model(x)
    beside.close([after, *beside.gradients(after, list(model.parameters()))], expected, tolerance)
    return report


@pytest.fixture
def calls(monkeypatch):
    """The names of the ops that are called."""
    found = []
    for module, op in (
        (fused.products, "linear"),
        (fused.mlps, "mlp"),
        (fused.convolution, "conv2d"),
        (fused.norms, "layer_norm"),
        (fused.norms, "rms_norm"),
        (fused.attention, "scaled_dot_product_attention"),
    ):
        real = getattr(module, op)
        monkeypatch.setattr(module, op, lambda *a, _real=real, _op=op, **k: (found.append(_op), _real(*a, **k))[1])
    return found


def test_a_perceptron(calls):
    model = mlp()
    report = agree(model, torch.randn(5, 7, dtype=F64), 1e-12)
    assert whats(report.replaced) == ["Linear + GELU", "Linear + ReLU + Linear"]
    assert calls == ["linear", "mlp"]
    assert report.kept == []
    assert str(report).startswith("2 replaced, 0 kept\n  0: Linear + GELU\n")


def test_a_linear_layer_alone_is_kept(calls):
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 5), nn.ReLU(), nn.Tanh()).to(F64)
    report = agree(model, torch.randn(5, 7, dtype=F64), 1e-12)
    assert whats(report.replaced) == ["Linear + ReLU"]
    assert calls == ["linear"]
    assert [(note.what, note.why) for note in report.kept] == [("Linear", "no ReLU or GELU follows it directly")]
    assert str(report).startswith("1 replaced, 1 kept\n  2: Linear + ReLU\n")


def test_convolutions(calls):
    for order in (torch.contiguous_format, torch.channels_last):
        report = agree(convnet(), torch.randn(2, 3, 8, 8, dtype=F64).to(memory_format=order), 1e-12)
        assert whats(report.replaced) == ["Conv2d + ReLU", "Conv2d + ReLU"]
    assert calls == ["conv2d"] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64], ids=str)
def test_a_transformers_block(dtype, calls):
    torch.manual_seed(0)
    model, x = Block().to(dtype), torch.randn(2, 9, 32, dtype=dtype)
    report = agree(model, x, {F64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.25}[dtype])
    expected = [
        "LayerNorm",
        "Linear + GELU + Linear",
        "Linear + ReLU",
        "RMSNorm",
        "layer_norm",
        "scaled_dot_product_attention",
    ]
    assert sorted(whats(report.replaced)) == expected
    assert sorted(whats(report.kept)) == ["Linear"] * 2
    assert [note.where for note in report.kept] == ["qkv", "out"]
    others = [] if dtype is F64 else ["layer_norm", "rms_norm", "layer_norm"]
    attention = ["scaled_dot_product_attention"] if dtype is torch.bfloat16 else []
    assert sorted(calls) == sorted(["mlp", "linear", *others, *attention]), "torch's own where no row has the dtype"


def test_bf16_is_as_near_to_f64_as_before():
    torch.manual_seed(0)
    model, x = Block().bfloat16(), torch.randn(4, 16, 32, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).double()(x.double())
    before = (model(x).double() - exact).norm()
    fuse(model)
    assert (model(x).double() - exact).norm() < 1.2 * before


def test_undo_and_state():
    model, x = nn.Sequential(mlp(), nn.LayerNorm(3, dtype=F64)), torch.randn(5, 7, dtype=F64)
    before, state, forward = model(x), model.state_dict(), model[0].forward
    names = [name for name, _ in model.named_modules()]
    report = fuse(model)
    assert model[0].forward != forward
    assert list(model.state_dict()) == list(state)
    assert [name for name, _ in model.named_modules()] == names
    report.undo()
    report.undo()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(model(x), before)


def test_weights_are_read_where_they_are():
    model, x = mlp(), torch.randn(5, 7, dtype=F64)
    fuse(model)
    other = mlp()
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    model.load_state_dict(other.state_dict())
    beside.close([model(x)], [other(x)], 1e-12)
    model[0].weight = nn.Parameter(torch.zeros(12, 7, dtype=F64))
    other[0].weight = model[0].weight
    beside.close([model(x)], [other(x)], 1e-12)
    twin = copy.deepcopy(model)
    nn.init.zeros_(model[4].weight)
    beside.close([twin(x)], [other(x)], 1e-12)
    beside.close([model.float()(x.float())], [F.linear(torch.zeros(5, 9), model[4].weight, model[4].bias)], 1e-6)


def test_gelu_by_erf_is_kept_and_said():
    class ByFunction(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(7, 7, dtype=F64)

        def forward(self, x):
            return F.gelu(self.up(x))

    model = nn.Sequential(nn.Linear(7, 7, dtype=F64), nn.GELU(), ByFunction())
    x = torch.randn(3, 7, dtype=F64)
    before = model(x)
    report = fuse(model)
    assert not report.replaced
    assert [note.why.split(",")[0] for note in report.kept] == ["GELU is the exact one (erf)"] * 2
    assert torch.equal(model(x), before)


class Odd(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.a, self.b = way, nn.Linear(7, 7, dtype=F64), nn.Conv2d(1, 1, 3, padding="same", dtype=F64)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, extra=None):
        if self.way == "twice":
            y = self.a(x)
            return F.relu(y) + y
        if self.way == "branch":
            return F.relu(self.a(x)) if x.sum() > 0 else x
        if self.way == "padding":
            return F.relu(self.b(x[None, None]))
        if self.way == "mask":
            return F.scaled_dot_product_attention(x, x, x, x @ x.mT)
        if self.way == "dropout":
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5 if self.training else 0.0)
        y = F.relu(F.linear(x, self.a.weight, bias=self.a.bias))
        return y if extra is None else y + extra


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("twice", "its result is also used elsewhere"),
        ("branch", "torch.fx cannot trace its forward"),
        ("padding", "its padding is 'same', zeros"),
    ],
)
def test_what_is_kept_says_why(way, why):
    model, x = Odd(way), torch.randn(7, 7, dtype=F64)
    before = model(x)
    report = fuse(model)
    assert not report.replaced
    assert any(why in note.why for note in report.kept), report
    assert torch.equal(model(x), before)


def test_training_is_asked_at_each_call():
    model, x = Odd("dropout"), torch.randn(7, 7, dtype=F64)
    report = fuse(model)
    assert whats(report.replaced) == ["scaled_dot_product_attention"]
    assert report.kept == []
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16], ids=str)
def test_attention_with_a_mask(dtype, calls):
    """By the op where it takes the operands, else by torch's own function."""
    model, x = Odd("mask"), torch.randn(2, 3, 6, 8, dtype=dtype)
    model.a, model.b = None, None
    before = model(x)
    assert whats(fuse(model).replaced) == ["scaled_dot_product_attention"]
    beside.close([model(x)], [before], 0 if dtype is F64 else 0.05)
    assert calls == ([] if dtype is F64 else ["scaled_dot_product_attention"])


def test_other_arguments_than_defaults_run_as_before(calls):
    model, x = Odd("function"), torch.randn(7, 7, dtype=F64)

    def run():
        return [model(x), model(x, x), model(x, extra=x), model(extra=x, x=x)]

    def with_defaults():
        return [model(x=x), model(x, None), model(x, extra=None), model(extra=None, x=x)]

    others, same = run(), with_defaults()
    assert whats(fuse(model).replaced) == ["Linear + ReLU"]
    beside.close(run(), others, 1e-12)
    assert calls == ["linear"]
    beside.close(with_defaults(), same, 1e-12)
    assert calls == ["linear"] * 5
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    beside.close([compiled(x, extra=None), compiled(x=x)], same[:2], 1e-12)


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"x": 1}), ((1,), {"other": 1})])
def test_arguments_that_do_not_fit_are_refused_as_before(args, kwargs):
    model = Odd("function")
    with pytest.raises(TypeError) as before:
        model(*args, **kwargs)
    fuse(model)
    with pytest.raises(TypeError) as after:
        model(*args, **kwargs)
    assert str(after.value) == str(before.value)


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_linears_that_are_in_no_pattern(dtype, calls):
    """Each is one call where that is asked for, and what torch takes alone runs as before."""

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.act, self.two, self.three = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 7)

        def forward(self, x, **kwargs):
            return self.three(self.two(x))

    torch.manual_seed(0)
    model = nn.Sequential(Reads(), nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4), nn.Linear(4, 4), nn.Tanh())
    if dtype is torch.float8_e4m3fn:
        model = model.to(torch.float32)
        model[4].weight = nn.Parameter(model[4].weight.to(dtype), requires_grad=False)
        assert "4" not in {note.where for note in fuse(model, linears=True).replaced}
        return
    model, x = model.to(dtype), torch.randn(3, 5, 16).to(dtype)
    before = model(x)
    report = fuse(model, linears=True)
    assert {(note.where, note.what) for note in report.replaced} == {
        ("1", "Linear + ReLU + Linear"),
        *((where, "Linear") for where in ("0.one", "0.two", "0.three", "4")),
    }
    assert [note.where for note in report.kept] == ["0"]
    beside.close([model(x)], [before], 1e-12 if dtype is F64 else 0.05)
    assert calls == ["linear", "linear", "mlp", "linear"]
    report.undo()
    assert torch.equal(model(x), before)


def test_hooks_stay():
    seen, model = [], mlp()
    model[0].register_forward_hook(lambda *_: seen.append(1))
    report = fuse(model)
    assert ("0", "0 has hooks") in [(note.where, note.why) for note in report.kept]
    model(torch.randn(2, 7, dtype=F64))
    assert seen == [1]


def test_a_second_time_changes_nothing():
    model = mlp()
    first, second = fuse(model), fuse(model)
    assert not second.replaced
    assert second.kept[0].why == "it has its own forward attribute already"
    second.undo()
    assert "forward" in model.__dict__
    first.undo()


def test_training_steps_are_those_of_before():
    torch.manual_seed(1)
    inputs, targets = torch.randn(64, 7, dtype=F64), torch.randint(0, 3, (64,))

    def losses(model):
        optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    model = mlp()
    expected = losses(model)
    model = mlp()
    fuse(model)
    assert max(abs(one - other) for one, other in zip(losses(model), expected, strict=True)) < 1e-9


def test_compile_and_export_of_a_fused_model():
    torch.compiler.reset()
    model, x = mlp(), torch.randn(5, 7, dtype=F64)
    expected = model(x)
    fuse(model)
    beside.close([torch.compile(model, backend="aot_eager", fullgraph=True)(x)], [expected], 1e-12)
    exported = torch.export.export(model, (x,))
    assert "dispatch.linear" in str(exported.graph)
    beside.close([exported.module()(x)], [expected], 1e-12)


def test_autocast():
    model, x = mlp(torch.float32), torch.randn(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        fuse(model)
        y = model(x)
    assert y.dtype == expected.dtype
    beside.close([y], [expected], 0.05)


def test_a_report_that_is_taken_for_the_model_says_so():
    report = fuse(mlp())
    with pytest.raises(AttributeError, match=r"no attribute 'parameters'; .* use the model"):
        report.parameters()
    with pytest.raises(TypeError, match=r"a Report is not a model; .* call the model"):
        report(torch.ones(2, 2))
    with pytest.raises(AttributeError, match=r"has no attribute 'replacd'$"):
        _ = report.replacd


def test_what_is_no_model_is_refused():
    with pytest.raises(BadRequest, match=r"model: got a list; expected a torch.nn.Module"):
        fuse([])
