"""`dispatch.torch.fuse` on the attention of transformers' models: of the package, and of a stand-in for it."""

from __future__ import annotations

import copy
import importlib.util
import pickle
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fuse = pytest.importorskip("dispatch.torch").fuse
fused = pytest.importorskip("dispatch.torch.fused")
attention = pytest.importorskip("dispatch.torch.transformers_attention")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

BF16 = torch.bfloat16
WHAT = "scaled_dot_product_attention"


@pytest.fixture
def calls(monkeypatch):
    """How often our op was called: a list with an element for each time."""
    seen, real = [], fused.attention.scaled_dot_product_attention
    monkeypatch.setattr(fused.attention, WHAT, lambda *a, **k: seen.append(1) or real(*a, **k))
    return seen


# -- a stand-in -----------------------------------------------------------------------------------------------------
def sdpa_attention_forward(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sink=None, **_
):
    """What transformers' own does, and it says that it ran."""
    del sink
    module.theirs += 1
    groups = getattr(module, "num_key_value_groups", 1)
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    is_causal = query.shape[2] > 1 and attention_mask is None and is_causal
    y = F.scaled_dot_product_attention(query, key, value, attention_mask, dropout, is_causal, scale=scaling)
    return y.transpose(1, 2).contiguous(), None


class AttentionInterface(dict):
    _global_mapping = {"sdpa": sdpa_attention_forward}  # noqa: RUF012

    def __getitem__(self, name):
        return super().__getitem__(name) if name in self else self._global_mapping[name]

    @classmethod
    def register(cls, name, function):
        cls._global_mapping[name] = function


ALL_ATTENTION_FUNCTIONS = AttentionInterface()


class Config:
    """Has the attributes of a config that count."""

    def __init__(self, chosen="sdpa", heads=4, groups=2):
        self._attn_implementation_internal, self.heads, self.groups = chosen, heads, groups

    @property
    def _attn_implementation(self):
        return self._attn_implementation_internal

    @_attn_implementation.setter
    def _attn_implementation(self, value):
        self._attn_implementation_internal = value


class Attention(nn.Module):
    def __init__(self, config, is_causal=True, width=32):
        super().__init__()
        self.config, self.is_causal, self.theirs = config, is_causal, 0
        self.num_key_value_groups, self.head = config.groups, width // config.heads
        kept = width // config.groups
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, kept), nn.Linear(width, kept)

    def forward(self, x, past=None, mask=None, **kwargs):
        every = x if past is None else torch.cat((past, x), 1)
        q, k, v = (
            layer(t).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer, t in ((self.q, x), (self.k, every), (self.v, every))
        )
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, q, k, v, mask, scaling=self.head**-0.5, **kwargs)[0].flatten(-2)


class Compares(Attention):
    def forward(self, x, **kwargs):
        mask = None if self.config._attn_implementation == "sdpa" else kwargs.get("mask")
        return ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](self, x, x, x, mask)


class OfItsOwn(Attention):
    def forward(self, x, **kwargs):
        return ALL_ATTENTION_FUNCTIONS[self.chosen](self, x, x, x, None)


class Biased(Attention):
    def forward(self, x, **kwargs):
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return attend(self, x, x, x, None, position_bias=x)


class Capped(Attention):
    attn_logit_softcapping = 50.0


@pytest.fixture
def stand_in(monkeypatch):
    """Have `dispatch` find the functions above where those of transformers are."""
    package = types.ModuleType("transformers")
    modeling, integrations = (types.ModuleType(f"transformers.{name}") for name in ("modeling_utils", "integrations"))
    own = types.ModuleType("transformers.integrations.sdpa_attention")
    modeling.AttentionInterface = AttentionInterface
    own.sdpa_attention_forward = sdpa_attention_forward
    for module in (package, modeling, integrations, own):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)


def close(one, other):
    assert (one.double() - other.double()).norm() <= 0.02 * other.double().norm()


def gradient(module, y):
    """In one row, since that of a key's bias alone is zero but for rounding."""
    return torch.cat([one.flatten() for one in beside.gradients(y, list(module.parameters()))])


MASK = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.7
TAKEN = {
    "causal by the module": ({}, {}),
    "not causal": ({}, {"is_causal": False}),
    "causal by the call": ({"is_causal": False}, {"is_causal": True}),
    "a mask of bools": ({}, {"mask": MASK}),
    "a mask of numbers": ({}, {"mask": MASK.to(BF16) * 3}),
    "a mask for each head": ({}, {"mask": MASK.expand(2, 4, 6, 6)}),
    "more keys than queries": ({}, {"past": torch.ones(2, 3, 32, dtype=BF16)}),
    "more keys, not causal": ({}, {"past": torch.ones(2, 3, 32, dtype=BF16), "is_causal": False}),
    "what nobody asked for": ({}, {"output_attentions": False, "softcap": None, "position_ids": MASK}),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.usefixtures("stand_in")
def test_what_our_function_takes(name, groups, calls):
    made, given = TAKEN[name]
    module, x = Attention(Config(groups=groups), **made).to(BF16), torch.randn(2, 6, 32, dtype=BF16)
    expected = module(x, **given)
    wanted = gradient(module, expected)
    report = fuse(module)
    assert [note.what for note in report.replaced] == [f"Attention: {WHAT}"]
    y = module(x, **given)
    assert (calls, module.theirs) == ([1], 1)
    assert y.stride() == expected.stride()
    close(y, expected)
    close(gradient(module, y), wanted)


LEFT = {
    "f32": (torch.float32, {}),
    "f64": (torch.float64, {}),
    "causal beside a mask": (BF16, {"mask": MASK, "is_causal": True}),
    "attentions": (BF16, {"output_attentions": True}),
    "softcap": (BF16, {"softcap": 3.0}),
    "a mask of heads": (BF16, {"head_mask": torch.ones(4)}),
    "a bias": (BF16, {"position_bias": torch.ones(6, 6)}),
    "a cache of pages": (BF16, {"cache": object()}),
    "what a later version takes": (BF16, {"sink": torch.ones(4)}),
}


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.usefixtures("stand_in")
def test_what_is_left_to_transformers(name, calls):
    dtype, given = LEFT[name]
    module, x = Attention(Config()).to(dtype), torch.randn(2, 6, 32, dtype=dtype)
    expected = module(x, **given)
    fuse(module)
    assert torch.equal(module(x, **given), expected)
    assert (calls, module.theirs) == ([], 2)


@pytest.mark.usefixtures("stand_in")
def test_one_token_beside_a_cache_is_left_to_transformers(calls):
    module, x, past = Attention(Config()).to(BF16), torch.randn(2, 1, 32).to(BF16), torch.randn(2, 9, 32).to(BF16)
    expected = module(x, past)
    fuse(module)
    assert torch.equal(module(x, past), expected)
    assert not calls


@pytest.mark.usefixtures("stand_in")
def test_dropout_by_our_op(calls):
    module, x = Attention(Config()).to(BF16), torch.randn(2, 6, 32, dtype=BF16)
    fuse(module)
    assert not torch.equal(module(x, dropout=0.5), module(x, dropout=0.5))
    assert (len(calls), module.theirs) == (2, 0)


@pytest.mark.parametrize(
    ("kind", "chosen", "why"),
    [
        (Attention, "eager", "its config selects 'eager' for attention, not 'sdpa': "),
        (Compares, "sdpa", "its forward compares the name of its attention function with 'sdpa'"),
        (OfItsOwn, "sdpa", "its forward does not read config._attn_implementation itself"),
        (Capped, "sdpa", "it caps its scores"),
        (Biased, "sdpa", "it adds a position bias to its scores"),
    ],
)
@pytest.mark.usefixtures("stand_in")
def test_what_is_kept_says_why(kind, chosen, why):
    module = kind(config := Config(chosen))
    report = fuse(module)
    assert not report.replaced
    assert any(note.why.startswith(why) for note in report.kept)
    assert module.config is config


@pytest.mark.usefixtures("stand_in")
def test_another_sdpa_function_is_kept(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *_, **__: None)
    report = fuse(Attention(Config()))
    assert "the sdpa function that it calls is not transformers' own" in {note.why for note in report.kept}


@pytest.mark.usefixtures("stand_in")
def test_the_config_stays_and_is_shared(calls):
    """Only the fused model calls ours, what is changed in the config counts, copies have one of their own."""
    config = Config()
    one, other, x = Attention(config).to(BF16), Attention(config).to(BF16), torch.randn(2, 6, 32, dtype=BF16)
    report = fuse(one)
    assert (one.config._attn_implementation, config._attn_implementation) == ("dispatch", "sdpa")
    assert isinstance(one.config, Config)
    other(x)
    assert not calls
    config.heads = 7
    assert one.config.heads == 7
    copied = copy.deepcopy(nn.ModuleList((one, other)))
    assert copied[0].config.__dict__ is copied[1].config.__dict__ is not config.__dict__
    copied[0](x)
    assert len(calls) == 1
    assert pickle.loads(pickle.dumps(one.config))._attn_implementation == "dispatch"
    one.config._attn_implementation = "eager"
    assert one.config._attn_implementation == config._attn_implementation == "eager"
    second = fuse(one)
    assert "its attention was replaced already" in {note.why for note in second.kept}
    second.undo()
    assert one.config is not config
    report.undo()
    report.undo()
    assert one.config is config


# -- the package ------------------------------------------------------------------------------------------------------
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {**SMALL, "vocab_size": 50}
GROUPED = {**WORDS, "num_key_value_heads": 2}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
SOUND = {
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))},
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    "d_model": 64,
    "vocab_size": 50,
    "pad_token_id": 0,
    "max_source_positions": 16,
    "num_mel_bins": 8,
    "decoder_start_token_id": 1,
}
MODELS = {
    "Llama": ("LlamaConfig", "LlamaModel", GROUPED),
    "Mistral": ("MistralConfig", "MistralModel", {**GROUPED, "sliding_window": 4}),
    "Qwen3": ("Qwen3Config", "Qwen3Model", {**GROUPED, "head_dim": 16}),
    "GPT2": ("GPT2Config", "GPT2Model", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50}),
    "ViT": ("ViTConfig", "ViTModel", IMAGE),
    "Siglip": ("SiglipVisionConfig", "SiglipVisionModel", IMAGE),
    "Whisper": ("WhisperConfig", "WhisperModel", SOUND),
}


def model_of(name, dtype=BF16):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config, kind, sizes = MODELS[name]
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval().to(dtype)


def operands(name, dtype=BF16):
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 50, (2, 12), generator=generator)
    if name == "Whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator).to(dtype), "decoder_input_ids": words}
    if MODELS[name][2] is IMAGE:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator).to(dtype)}
    return {"input_ids": words, "attention_mask": torch.tensor([[1] * 12, [1] * 9 + [0] * 3])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name, calls):
    model, given = model_of(name), operands(name)
    seen = given.get("attention_mask", torch.ones(2, 1)).bool()
    seen = seen if "attention_mask" in given else slice(None)

    def run(one, inputs):
        return one(**inputs).last_hidden_state[seen]

    with torch.no_grad():
        exact = run(copy.deepcopy(model).double(), operands(name, torch.float64)).double()
        before = run(model, given)
        report = fuse(model)
        after = run(model, given)
        count = sum(WHAT in note.what for note in report.replaced)
        assert count == (6 if name == "Whisper" else 2)
        assert len(calls) == count
        assert (after - exact).norm() <= 1.5 * (before - exact).norm()
        report.undo()
        assert torch.equal(run(model, given), before)


@pytest.mark.filterwarnings("ignore")
def test_a_llama_with_a_cache_attentions_and_gradients(calls):
    """A cache with a chunk behind it, a choice of eager attention afterwards, a training step, and a copy."""
    model, words = model_of("Llama"), operands("Llama")["input_ids"]
    with torch.no_grad():
        expected = model(words).last_hidden_state
        fuse(model)
        first = model(words[:, :7], use_cache=True)
        second = model(words[:, 7:], past_key_values=first.past_key_values, use_cache=True)
        assert len(calls) == 4
        close(torch.cat((first.last_hidden_state, second.last_hidden_state), 1), expected)
    copied = copy.deepcopy(model).train()
    copied(words).last_hidden_state.float().square().sum().backward()
    assert len(calls) == 6
    assert all(p.grad is not None and p.grad.isfinite().all() for p in copied.layers.parameters())
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(words, output_attentions=True)
    assert found.attentions[0].shape == (2, 4, 12, 12)
    assert len(calls) == 6
    close(found.last_hidden_state, expected)


@pytest.mark.filterwarnings("ignore")
def test_all_linear_layers_of_a_llama(monkeypatch):
    model, words = model_of("Llama"), operands("Llama")["input_ids"]
    called, real = [], fused.products.linear
    with torch.no_grad():
        expected = model(words).last_hidden_state
        report = fuse(model, linears=True)
        monkeypatch.setattr(fused.products, "linear", lambda *a: called.append(1) or real(*a))
        close(model(words).last_hidden_state, expected)
    assert sum(note.what == "Linear" for note in report.replaced) == len(called) == 14
    assert not [note for note in report.kept if note.what == "Linear"]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_llama():
    torch.compiler.reset()
    model, words = model_of("Llama"), operands("Llama")["input_ids"]
    with torch.no_grad():
        expected = model(words).last_hidden_state
        fuse(model)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        close(compiled(words).last_hidden_state, expected)
