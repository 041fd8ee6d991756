"""`dispatch.torch.fuse` on rotary embeddings of transformers' models, and on gates: stand-ins, and the package."""

from __future__ import annotations

import copy
import functools

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fuse = pytest.importorskip("dispatch.torch").fuse
fused = pytest.importorskip("dispatch.torch.fused")
rotary = pytest.importorskip("dispatch.torch.transformers_rotary")

NAME = "apply_rotary_pos_emb"
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def calls(monkeypatch):
    """How often our op was called: a list with an element for each time."""
    seen, real = [], fused.rotary.rope
    monkeypatch.setattr(fused.rotary, "rope", lambda *a: seen.append(1) or real(*a))
    return seen


# -- a stand-in -----------------------------------------------------------------------------------------------------
theirs = []  # an element for each time that this runs


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    theirs.append(1)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Turned(nn.Module):
    """Queries and keys of an attention."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(16, 32, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x, angles, **kwargs):
        at = 2 if kwargs.get("unsqueeze_dim") == 2 else 1
        q, k = (layer(x).unflatten(-1, (-1, 8)) for layer in (self.q, self.k))
        q, k = apply_rotary_pos_emb(*(t if at == 2 else t.transpose(1, 2) for t in (q, k)), *angles, **kwargs)
        return q, k


def operands(dtype=F32, tokens=5, factor=None):
    torch.manual_seed(0)
    x = torch.randn(2, tokens, 16, dtype=dtype)
    return x, tuple(torch.randn(2, tokens, 8, dtype=factor or dtype) for _ in range(2))


def close(found, expected, dtype):
    for one, other in zip(found, expected, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


def gradients(module, both):
    return torch.autograd.grad(sum((y.double() ** 2).sum() for y in both), list(module.parameters()))


@pytest.mark.parametrize("choices", [{}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_what_our_function_takes(dtype, choices, calls):
    module, given = Turned().to(dtype), operands(dtype)
    expected = module(*given, **choices)
    wanted = gradients(module, expected)
    report = fuse(module)
    assert [(note.where, note.what) for note in report.replaced] == [("", f"Turned: {NAME}")]
    theirs.clear()
    found = module(*given, **choices)
    assert (calls, theirs) == ([1], [])
    close(found, expected, dtype)
    for one, other in zip(gradients(module, found), wanted, strict=True):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()
    report.undo()
    assert all(torch.equal(*both) for both in zip(module(*given, **choices), expected, strict=True))
    assert "forward" not in module.__dict__


def test_what_is_left_to_theirs(calls):
    module, (x, angles) = Turned(), operands()
    fuse(module)
    theirs.clear()
    module(x, tuple(t.requires_grad_() for t in angles))
    module(x, operands(factor=F64)[1])
    module(x, tuple(t[:, :1].detach() for t in angles))
    with torch.autocast("cpu", BF16):  # products are bf16, and angles f32
        assert [y.dtype for y in module(x, operands()[1])] == [F32] * 2
    module(*operands(tokens=0))
    assert (calls, len(theirs)) == ([], 5)
    module.half()
    module(x.half(), operands(torch.float16)[1])
    assert len(calls) == 1
    module.to("meta")
    assert module(x.to("meta"), tuple(t.to("meta") for t in angles))[0].is_meta
    assert len(theirs) == 6


def halves_of_cos(q, k, cos, sin, unsqueeze_dim=1):
    """Reads the first half of cos alone, which is the same where both halves are."""
    cos, sin = (t[..., : t.shape[-1] // 2].repeat(1, 1, 2).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def by_pairs(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    both = [torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2) for t in (q, k)]
    return q * cos + both[0] * sin, k * cos + both[1] * sin


def of_one(x, cos, sin, unsqueeze_dim=1):
    return x * cos.unsqueeze(unsqueeze_dim) + rotate_half(x) * sin.unsqueeze(unsqueeze_dim)


def scaled(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(0.5 * t for t in apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim))


def without_axis(q, k, cos, sin):
    return apply_rotary_pos_emb(q, k, cos, sin)


@pytest.mark.parametrize("other", [halves_of_cos, by_pairs, of_one, scaled, without_axis])
def test_functions_of_another_meaning_are_kept(other, monkeypatch):
    monkeypatch.setitem(globals(), NAME, other)
    module = Turned()
    report = fuse(module)
    assert not report.replaced
    assert "forward" not in module.__dict__
    why = f"its {NAME} does not compute x · cos + rotate_half(x) · sin of q and k"
    assert (f"Turned: {NAME}", why) in {(note.what, note.why) for note in report.kept}


def test_another_default_axis_is_read_from_the_signature(calls, monkeypatch):
    def of_tokens(q, k, cos, sin, position_ids=None, unsqueeze_dim=2):
        del position_ids
        return real(q, k, cos, sin, unsqueeze_dim)

    real, given = apply_rotary_pos_emb, operands()
    monkeypatch.setitem(globals(), NAME, of_tokens)
    module = Turned()
    expected = module(*given, unsqueeze_dim=2)
    assert fuse(module).replaced
    close(module(*given, unsqueeze_dim=2), expected, F32)
    assert len(calls) == 1
    assert rotary.semantics_of(of_tokens).axis == 2


def counting(forward):
    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        self.counted += 1
        return forward(self, *args, **kwargs)

    return wrapper


def hiding(forward):
    return functools.wraps(forward)(functools.partial(forward))


class Decorated(Turned):
    counted = 0

    @counting
    @counting
    def forward(self, x, angles, *, scale=2.0):
        assert __class__ is Decorated  # a cell, as super() has one
        q = super().forward(x, angles)[0]
        return apply_rotary_pos_emb(q * scale, q, *angles)


def test_decorators_cells_and_defaults_stay(calls):
    module, given = Decorated(), operands()
    expected = module(*given)
    assert fuse(module).replaced
    close(module(*given), expected, F32)
    close(module(*given, scale=2.0), expected, F32)
    assert (module.counted, len(calls)) == (6, 2)


def test_a_decorator_that_hides_what_it_wraps_is_kept():
    class Hidden(Turned):
        pass

    Hidden.forward = hiding(Turned.forward)
    report = fuse(Hidden())
    assert not report.replaced
    assert "a decorator of its forward does not hold the wrapped function in its closure" in {
        note.why for note in report.kept
    }


def test_hooks_copies_and_a_second_fuse(calls):
    module, given, seen = Turned(), operands(), []
    module.register_forward_hook(lambda *_: seen.append(1))
    first = fuse(module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.q.weight.zero_()
    assert copied(*given)[0].count_nonzero() == 0
    assert module(*given)[0].count_nonzero() > 0
    assert (len(calls), len(seen)) == (2, 2)
    second = fuse(module)
    assert not second.replaced
    second.undo()
    module(*given)
    assert len(calls) == 3
    first.undo()
    module(*given)
    assert len(calls) == 3
    copied(*given)
    assert len(calls) == 4


def test_a_compiled_model_calls_it_and_compiles_once():
    torch.compiler.reset()
    module, given = Turned(), operands()
    with torch.no_grad():
        fuse(module)
        expected = module(*given)
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph

        compiled = torch.compile(module, backend=backend, fullgraph=True)
        for _ in range(3):
            close(compiled(*given), expected, F32)
    assert len(graphs) == 1
    assert any("rope" in str(node.target) for node in graphs[0].graph.nodes)


# -- gates ----------------------------------------------------------------------------------------------------------
class Fused(nn.Module):
    """As Phi-3 has it: both halves by one product."""

    def __init__(self, act):
        super().__init__()
        self.both, self.act = nn.Linear(16, 48), act

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return up * self.act(gate)


class Reads(Fused):
    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        active = F.silu(gate)
        return up * active + active


class InPlace(Fused):
    def forward(self, x):
        first, second = self.both(x), self.both(x + 1)
        return first * F.silu(second[:, :], inplace=True) + second * F.silu(first.view(first.shape), True)


@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU()], ids=str)
@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
def test_halves_of_one_product(act, dtype, monkeypatch):
    seen, real = [], fused.gated_ops.gated_activation
    monkeypatch.setattr(fused.gated_ops, "gated_activation", lambda *a: seen.append(a[2]) or real(*a))
    torch.manual_seed(0)
    module, x = Fused(act).to(dtype), torch.randn(3, 5, 16, dtype=dtype)
    expected = module(x)
    wanted = torch.autograd.grad(expected.double().square().sum(), list(module.parameters()))
    report = fuse(module)
    name = "GELU" if isinstance(act, nn.GELU) else "SiLU"
    assert [note.what for note in report.replaced] == [f"{name} · up"]
    found = module(x)
    assert seen == [name.lower()]
    torch.testing.assert_close(found, expected, rtol=8 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    for one, other in zip(
        torch.autograd.grad(found.double().square().sum(), list(module.parameters())), wanted, strict=True
    ):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()
    report.undo()
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize("kind", [Reads, InPlace])
def test_gates_that_others_read_stay(kind):
    torch.manual_seed(0)
    module, x = kind(nn.SiLU()), torch.randn(3, 16)
    with torch.no_grad():
        expected = module(x)
        fuse(module)
        torch.testing.assert_close(module(x), expected)


def test_gates_that_broadcast_or_have_hooks_are_torchs(monkeypatch):
    class Row(Fused):
        def forward(self, x):
            return self.act(self.both(x)) * self.both(x[:1])

    monkeypatch.setattr(fused.gated_ops, "gated_activation", lambda *_: pytest.fail("it takes no such operands"))
    module, x = Row(nn.SiLU()), torch.randn(3, 16)
    expected = module(x)
    assert fuse(module).replaced
    torch.testing.assert_close(module(x), expected)
    hooked = Fused(nn.SiLU())
    hooked.act.register_forward_hook(lambda *_: None)
    report = fuse(hooked)
    assert not report.replaced
    assert "act has hooks" in {note.why for note in report.kept}


# -- the package ------------------------------------------------------------------------------------------------------
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2}
MODELS = {
    "Llama": (GROUPED, 2),
    "Mistral": ({**GROUPED, "sliding_window": 4}, 2),
    "Qwen2": (GROUPED, 2),
    "Qwen3": ({**GROUPED, "head_dim": 16}, 2),
    "Phi": ({**GROUPED, "partial_rotary_factor": 0.5}, 2),
    "Gemma": ({**GROUPED, "head_dim": 16}, 2),
    "Cohere": ({**GROUPED, "pad_token_id": 0}, 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name, calls):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    sizes, count = MODELS[name]
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**sizes)).eval()
    words = torch.randint(1, 50, (2, 12))
    with torch.no_grad():
        before = model(words).last_hidden_state
        report = fuse(model)
        after = model(words).last_hidden_state
        notes = [*report.replaced, *report.kept]
        assert sum(NAME in note.what for note in notes) == 2
        assert sum(NAME in note.what for note in report.replaced) == count == len(calls)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
        report.undo()
        assert torch.equal(model(words).last_hidden_state, before)
