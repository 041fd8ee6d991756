"""What is set on a model after `fuse`, hooks, choices, other children, counts as in a model that is not fused."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from dispatch.errors import BadRequest  # noqa: E402
from dispatch.torch import fuse  # noqa: E402

F = nn.functional


class Net(nn.Module):
    """Each pattern whose children are not called any more, and branches."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.alone = nn.Conv2d(8, 8, 1)
        self.one, self.act, self.two = nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8)
        self.gate, self.silu = nn.Linear(8, 8), nn.SiLU()
        self.more = nn.ModuleList([nn.Linear(8, 8)])
        self.scale, self.flag, self.last = 2.0, True, None

    def forward(self, x):
        y = self.relu(self.bn(self.conv(x)))
        y = F.relu(self.alone(y)).mean((2, 3)) * self.scale
        y = self.two(self.act(self.one(y)))
        y = self.silu(self.gate(y)) * y
        for layer in self.more:
            y = torch.tanh(layer(y))
        if self.last is not None:
            y = self.last(y)
        return y if self.flag else -y


def net():
    torch.manual_seed(0)
    made = Net().eval()
    with torch.no_grad():
        made.bn.running_mean.normal_()
        made.bn.running_var.uniform_(0.1, 2)
        made.bn.weight.normal_()
    return made


def own(x):
    return x * 3


CHANGES = {
    "an epsilon": lambda m: setattr(m.bn, "eps", 0.5),
    "a stride": lambda m: setattr(m.conv, "stride", (2, 2)),
    "a padding": lambda m: setattr(m.conv, "padding", (0, 0)),
    "a mode of padding": lambda m: setattr(m.alone, "padding_mode", "circular"),
    "a batch norm in training": lambda m: m.bn.train(),
    "statistics taken away": lambda m: (setattr(m.bn, "running_mean", None), setattr(m.bn, "running_var", None)),
    "another GELU": lambda m: setattr(m.act, "approximate", "none"),
    "another activation": lambda m: setattr(m, "act", nn.ReLU()),
    "no batch norm": lambda m: setattr(m, "bn", nn.Identity()),
    "another convolution": lambda m: setattr(m, "conv", copy.deepcopy(m.conv).requires_grad_(False)),
    "one that differs": lambda m: setattr(m, "alone", nn.Conv2d(8, 8, 3).apply(lambda c: nn.init.ones_(c.weight))),
    "no bias": lambda m: setattr(m.one, "bias", None),
    "a number": lambda m: setattr(m, "scale", 3.0),
    "numbers in the place of one": lambda m: setattr(m, "scale", torch.arange(8.0)),
    "a branch": lambda m: setattr(m, "flag", False),
    "a child that was None": lambda m: setattr(m, "last", nn.Tanh()),
    "a longer list": lambda m: m.more.append(nn.Identity()),
    "a forward of a child's own": lambda m: setattr(m.gate, "forward", own),
    "a hook": lambda m: m.act.register_forward_hook(lambda _, __, out: out + 1),
    "a hook of a batch norm": lambda m: m.bn.register_forward_hook(lambda _, __, out: out + 1),
    "a hook before": lambda m: m.two.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_copy", [False, True], ids=["", "copy"])
def test_what_is_set_after_fuse_counts(change, is_copy):
    model, plain, x = net(), net(), torch.randn(2, 3, 9, 9)
    report = fuse(model)
    assert len(report.replaced) >= 4
    model(x)
    if is_copy:
        model = copy.deepcopy(model)
    for each in (model, plain):
        torch.manual_seed(1)
        CHANGES[change](each)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def forwards(model):
    model.train()
    for _ in range(3):
        model(3 * torch.randn(4, 3, 9, 9) + 1)
    model.eval()


def trained_head(model):
    """One whose convolution and norm are frozen, so that their statistics alone change."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    forwards(model)


def norm_alone(model):
    model.bn.train()
    model(2 * torch.randn(4, 3, 9, 9))
    model.bn.eval()


@pytest.mark.parametrize("change", [forwards, trained_head, norm_alone])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_statistics_that_training_has_moved_count(change, dtype):
    """torch counts no change of them, so that its count of batches is looked at."""
    plain, x = net().to(dtype), torch.randn(2, 3, 9, 9, dtype=dtype)
    torch.set_default_dtype(dtype)
    try:
        model = copy.deepcopy(plain)
        fuse(model)
        with torch.no_grad():
            for turn in range(3):
                torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
                for each in (model, plain):
                    torch.manual_seed(turn)
                    change(each)
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_equal_child_stays_fused_and_what_is_set_back_is_fused_again(monkeypatch):
    from dispatch.torch import fused

    calls, before = [], fused.conv_of_norm
    monkeypatch.setattr(fused, "conv_of_norm", lambda *given: calls.append(1) or before(*given))
    model, x = net(), torch.randn(2, 3, 9, 9)
    fuse(model)
    model(x)
    model.bn.eps, eps = 0.5, model.bn.eps
    model(x)
    model.bn.eps = eps
    model(x)
    model.conv = nn.Conv2d(3, 8, 3, padding=1)
    model(x)
    assert len(calls) == 3


def test_hooks_everywhere_see_each_module():
    model, plain, seen = net(), net(), []
    fuse(model)
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        model(torch.randn(2, 3, 9, 9))
        found = seen.copy()
        seen.clear()
        plain(torch.randn(2, 3, 9, 9))
        assert found == seen
    finally:
        hook.remove()


def test_gradient_hooks_are_called():
    model, seen = net(), []
    fuse(model)
    model.act.register_full_backward_hook(lambda *_: seen.append(1))
    model(torch.randn(2, 3, 9, 9)).sum().backward()
    assert seen == [1]


def test_a_compiled_model_sees_what_was_set_before_and_choices_after():
    torch.compiler.reset()
    model, plain, x = net(), net(), torch.randn(2, 3, 9, 9)
    fuse(model)
    for each in (model, plain):
        each.bn.eps = 0.5
        each.one.register_forward_hook(lambda _, __, out: out + 1)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
        for each in (model, plain):
            each.bn.eps, each.flag = 0.9, False
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["linear1", "linear2", "dropout"])
def test_hooks_in_layers_of_transformers_are_called(name):
    layer, seen = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval(), []
    fuse(layer)
    getattr(layer, name).register_forward_hook(lambda *_: seen.append(1))
    layer(torch.randn(2, 5, 32))
    assert seen == [1]


def test_another_activation_in_a_layer_counts():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    plain, x = copy.deepcopy(layer), torch.randn(2, 5, 32)
    fuse(layer)
    for each in (layer, plain):
        each.activation, each.activation_relu_or_gelu = torch.tanh, 0
    torch.testing.assert_close(layer(x), plain(x))


# -- undo -------------------------------------------------------------------------------------------------------------
def test_undo_leaves_a_forward_that_was_set_since():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8)), torch.randn(2, 8)
    report = fuse(model)
    model[2].forward = own
    report.undo()
    assert model[2].forward is own
    assert "forward" not in model.__dict__
    torch.testing.assert_close(model(x), 3 * torch.relu(model[0](x)))


@pytest.mark.parametrize("graphs", [False, True])
def test_undo_leaves_a_forward_that_was_set_over_the_fused_one(graphs):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
    before = model(x)
    report = fuse(model, graphs=graphs)
    fused = model.forward
    model.forward = lambda x: 2 * fused(x)
    report.undo()
    torch.testing.assert_close(model(x), 2 * before)
    del model.forward
    torch.testing.assert_close(model(x), before)


def test_what_was_fused_twice_is_undone_in_the_other_order():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
    before = model(x)
    first = fuse(model)
    once = model.forward
    second = fuse(model, graphs=True)
    assert model.forward is not once
    second.undo()
    assert model.forward is once
    first.undo()
    assert "forward" not in model.__dict__
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_model_that_was_saved_while_fused_loads_as_torchs_own_and_is_fused_again(graphs):
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.RMSNorm(16))
    x = torch.randn(5, 16)
    expected = model(x)
    replaced = fuse(model, linears=True, graphs=graphs).replaced
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(x), expected)
    assert {layer.forward.__func__ for layer in loaded} == {type(layer).forward for layer in loaded}
    assert fuse(loaded, linears=True, graphs=graphs).replaced == replaced
    torch.testing.assert_close(loaded(x), expected)


@pytest.mark.parametrize("name", ["trees", "linears", "graphs"])
@pytest.mark.parametrize("value", ["x", 1, None])
def test_choices_that_are_no_bools_are_refused_before_anything_is_replaced(name, value):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(BadRequest, match=f"{name}: got {value!r}; expected a bool"):
        fuse(model, **{name: value})
    assert "forward" not in model.__dict__
