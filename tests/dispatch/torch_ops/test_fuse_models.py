"""`dispatch.torch.fuse` on what models of others have: batch norms, RMS norms of their own, gates by SiLU."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fuse = pytest.importorskip("dispatch.torch").fuse
fused = pytest.importorskip("dispatch.torch.fused")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F64 = torch.float64


class Residual(nn.Module):
    """A block of a ResNet, with its sum written in several ways."""

    def __init__(self, sums="iadd", channels=4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels, affine=False)
        self.down = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))
        self.relu, self.sums = nn.ReLU(inplace=True), sums
        for bn in (self.bn1, self.bn2, self.down[1]):
            bn.running_mean.normal_()
            bn.running_var.uniform_(0.25, 4)
        for bn in (self.bn1, self.down[1]):
            nn.init.normal_(bn.weight)
            nn.init.normal_(bn.bias)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        other = self.down(x)
        if self.sums == "iadd":
            y += other
        elif self.sums == "first":
            y = y + other
        elif self.sums == "second":
            y = torch.add(other, y)
        elif self.sums == "broadcast":
            y = y + other.mean((2, 3), keepdim=True)
        return F.relu(y) + other if self.sums == "none" else F.relu(y)


def block(sums="iadd", dtype=F64):
    torch.manual_seed(0)
    return Residual(sums).to(dtype).eval()


def whats(notes):
    return sorted(note.what for note in notes)


def agree(model, x, tolerance, **choices):
    """The same results and gradients, and the very same bits after undo."""
    before = model(x)
    given = [p for p in model.parameters() if p.requires_grad]
    wanted = beside.gradients(model(x), given)
    report = fuse(model, **choices)
    beside.close([model(x), *beside.gradients(model(x), given)], [before, *wanted], tolerance)
    with torch.no_grad():
        beside.close([model(x), model(x)], [before, before], tolerance)
    report.undo()
    assert torch.equal(model(x), before)
    return report


@pytest.mark.parametrize("sums", ["iadd", "first", "second", "broadcast", "none"])
def test_batch_norms_are_folded(sums):
    for order in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(2, 4, 7, 6, dtype=F64).to(memory_format=order)
        report = agree(block(sums), x, 1e-11)
        last = "Conv2d + BatchNorm2d + ReLU" if sums == "none" else "Conv2d + BatchNorm2d + sum + ReLU"
        assert whats(report.replaced) == ["Conv2d + BatchNorm2d", "Conv2d + BatchNorm2d + ReLU", last]
        assert {note.why for note in report.kept} == {"its batch norm is only folded in eval mode"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_batch_norms(dtype):
    model, x = block(dtype=dtype), torch.randn(2, 4, 8, 8, dtype=dtype)
    exact = copy.deepcopy(model).double()(x.double())
    before = (model(x).double() - exact).norm()
    fuse(model)
    with torch.no_grad():
        assert (model(x).double() - exact).norm() < 1.5 * before + 1e-4


def test_in_training_a_batch_norm_is_what_it_was():
    model, x = block(), torch.randn(2, 4, 7, 6, dtype=F64)
    other = copy.deepcopy(model)
    fuse(model)
    assert torch.equal(model.train()(x), other.train()(x))
    assert torch.equal(model.bn1.running_mean, other.bn1.running_mean)
    beside.close([model.eval()(x)], [other.eval()(x)], 1e-11)


def test_a_change_of_weights_or_statistics_is_seen():
    model, x = block(), torch.randn(2, 4, 7, 6, dtype=F64)
    fuse(model)
    with torch.no_grad():
        for change in (
            lambda m: m.conv1.weight.mul_(2),
            lambda m: m.bn1.running_var.mul_(3),
            lambda m: m.bn1.weight.neg_(),
            lambda m: m.conv2.bias.add_(1),
            lambda m: setattr(m.bn1, "bias", nn.Parameter(torch.ones(4, dtype=F64))),
            lambda m: m.load_state_dict({name: t * 0.5 for name, t in m.state_dict().items()}),
        ):
            model(x)
            change(model)
            plain = copy.deepcopy(model)
            plain.__dict__.pop("forward")
            plain.down.__dict__.pop("forward")
            beside.close([model(x)], [plain(x)], 1e-11)
    with torch.inference_mode():
        beside.close([model(x)], [plain(x)], 1e-11)


def test_batch_norms_that_are_kept_say_why():
    class Odd(nn.Module):
        def __init__(self, way):
            super().__init__()
            self.way, self.conv, self.bn = way, nn.Conv2d(1, 1, 3, padding=0), nn.BatchNorm2d(1)
            if way == "statistics":
                self.bn = nn.BatchNorm2d(1, track_running_stats=False)
            if way == "padding":
                self.conv = nn.Conv2d(1, 1, 3, padding="same")
            if way == "hooks":
                self.bn.register_forward_hook(lambda *_: None)

        def forward(self, x):
            y = self.conv(x)
            z = F.relu(self.bn(y))
            return z + y.sum() if self.way == "twice" else z

    for way, why in (
        ("statistics", "its batch norm has no running statistics"),
        ("padding", "its padding is 'same', zeros"),
        ("hooks", "bn has hooks"),
        ("twice", "its result is also used elsewhere"),
    ):
        model, x = Odd(way).eval(), torch.randn(1, 1, 5, 5)
        before = model(x)
        report = fuse(model)
        assert not report.replaced
        assert why in {note.why for note in report.kept}
        assert torch.equal(model(x), before)


# -- norms and gates --------------------------------------------------------------------------------------------------
class OwnRMSNorm(nn.Module):
    """As Llama's is written, and three that are something else."""

    def __init__(self, width, kind="llama"):
        super().__init__()
        self.weight, self.variance_epsilon, self.kind = nn.Parameter(torch.rand(width) + 0.5), 1e-3, kind

    def forward(self, x):
        wide = x.float()
        if self.kind == "centred":
            wide = wide - wide.mean(-1, keepdim=True)
        epsilon = 1e-6 if self.kind == "epsilon" else self.variance_epsilon
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (1 + self.weight if self.kind == "gemma" else self.weight) * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norms_of_others(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(OwnRMSNorm(24)).to(dtype)
    report = agree(model, torch.randn(3, 5, 24, dtype=dtype), 8 * torch.finfo(dtype).eps)
    assert whats(report.replaced) == ["OwnRMSNorm"]


@pytest.mark.parametrize("kind", ["centred", "epsilon", "gemma"])
def test_what_is_no_rms_norm_is_kept(kind):
    model, x = nn.Sequential(OwnRMSNorm(24, kind)), torch.randn(3, 24)
    before, state = model(x), torch.get_rng_state()
    report = fuse(model)
    assert [note.why for note in report.kept] == ["it does not compute weight · x / √(mean of x² + eps)"]
    assert not report.replaced
    assert torch.equal(model(x), before)
    assert torch.equal(torch.get_rng_state(), state)


class Gated(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.gate, self.up = nn.Linear(24, 40, bias=bias), nn.Linear(24, 40, bias=bias)
        self.down, self.act = nn.Linear(40, 24, bias=bias), nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gates_by_silu(bias, dtype, monkeypatch):
    torch.manual_seed(0)
    model, x, called = Gated(bias).to(dtype), torch.randn(3, 5, 24, dtype=dtype), []
    real = fused.trees.tree_linear
    monkeypatch.setattr(fused.trees, "tree_linear", lambda *a, **k: called.append(1) or real(*a, **k))
    report = agree(model, x, 4 * torch.finfo(dtype).eps)
    assert whats(report.replaced) == ["SiLU · up"]
    assert not called
    report.undo()
    report = agree(model, x, 4 * torch.finfo(dtype).eps, trees=True)
    assert whats(report.replaced) == ["Linear + SiLU · gate"]
    assert len(called) == (2 if dtype is torch.bfloat16 else 0), (
        "where no gradient is asked for and a row has the dtype"
    )


# -- models that nobody here wrote ------------------------------------------------------------------------------------
@pytest.mark.filterwarnings("ignore")
def test_a_llama_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, **sizes)
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        before = model(tokens).logits
        report = fuse(model, trees=True)
        beside.close([model(tokens).logits], [before], 1e-4)
        attention = [f"LlamaAttention: {name}" for name in ("apply_rotary_pos_emb", "scaled_dot_product_attention")]
        expected = ["Linear + SiLU · gate"] * 2 + sorted(attention * 2) + ["LlamaRMSNorm"] * 5
        assert whats(report.replaced) == expected
        report.undo()
        assert torch.equal(model(tokens).logits, before)


@pytest.mark.filterwarnings("ignore")
def test_a_resnet_of_torchvision():
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed")
    torch.manual_seed(0)
    model, x = torchvision.models.resnet18(weights=None).eval(), torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = model(x)
        report = fuse(model)
        beside.close([model(x)], [before], 1e-4)
        assert len(report.replaced) == 20
        report.undo()
        assert torch.equal(model(x), before)
