"""`dispatch.torch.fuse` on torch's own layers for transformers, which pass their modules by in eval mode."""

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

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
WIDTH, HEADS = 32, 4
ATTENTION = "MultiheadAttention, with need_weights=False"
ENCODER = "TransformerEncoderLayer, whose modules are called in eval mode, too"


@pytest.fixture
def calls(monkeypatch):
    """The names of the ops that are called."""
    found = []
    for module, op in (
        (fused.products, "linear"),
        (fused.mlps, "mlp"),
        (fused.norms, "layer_norm"),
        (fused.attention, "scaled_dot_product_attention"),
    ):
        real = getattr(module, op)
        monkeypatch.setattr(module, op, lambda *a, _real=real, _op=op, **k: (found.append(_op), _real(*a, **k))[1])
    return found


def whats(notes):
    return [note.what for note in notes]


def near(one, other, tolerance):
    assert one.shape == other.shape
    assert one.dtype == other.dtype
    assert (one.double() - other.double()).norm() <= tolerance * other.double().norm()


def rows(module, y):
    """All gradients in one row."""
    return torch.cat([one.flatten() for one in beside.gradients(y, list(module.parameters()))])


# -- attention --------------------------------------------------------------------------------------------------------
GENERATOR = torch.Generator().manual_seed(3)
HIDDEN = torch.rand(6, 6, generator=GENERATOR) < 0.3
HIDDEN.fill_diagonal_(False)
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
MASKS = {
    "none": {},
    "bools": {"attn_mask": HIDDEN},
    "numbers": {"attn_mask": HIDDEN.to(BF16) * -2},
    "one for each head": {"attn_mask": HIDDEN.expand(2 * HEADS, 6, 6)},
    "padding": {"key_padding_mask": PADDING},
    "padding by numbers": {"key_padding_mask": torch.zeros(2, 6, dtype=BF16).masked_fill(PADDING, -torch.inf)},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
    "both by numbers": {"attn_mask": HIDDEN.to(BF16) * -2, "key_padding_mask": PADDING.to(BF16) * -8},
    "causal": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1), "is_causal": True},
    "causal and padding": {
        "attn_mask": torch.ones(6, 6, dtype=torch.bool).triu(1),
        "key_padding_mask": PADDING,
        "is_causal": True,
    },
}


def attention(dtype=BF16, **choices):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, **choices).to(dtype)
    for bias in (module.in_proj_bias, module.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return module


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_of_attention(name, training, batch_first, calls):
    module = attention(batch_first=batch_first).train(training)
    x = torch.randn(2, 6, WIDTH, dtype=BF16)
    x = x if batch_first else x.transpose(0, 1)
    given = {"need_weights": False, **MASKS[name]}
    expected = module(x, x, x, **given)[0]
    wanted = rows(module, expected)
    with torch.no_grad():
        fast = module(x, x, x, **given)[0]
        report = fuse(module)
        assert whats(report.replaced) == [ATTENTION]
        y, weights = module(x, x, x, **given)
        near(y, fast, 0.02)
    assert weights is None
    assert calls == ["scaled_dot_product_attention"]
    y = module(x, x, x, **given)[0]
    near(y, expected, 0.02)
    near(rows(module, y), wanted, 0.03)
    report.undo()
    assert torch.equal(module(x, x, x, **given)[0], expected)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("linears", [True, False])
def test_attention_to_others(bias, linears, calls):
    module, x, others, last = attention(bias=bias, batch_first=True), *torch.randn(3, 2, 6, WIDTH).to(BF16)
    ways = ((x, others[:, :5], others[:, :5]), (x, memory := others[:, 1:], memory), (x, others, last))
    expected = [module(*way, need_weights=False)[0] for way in ways]
    fuse(module, linears=linears)
    for way, one in zip(ways, expected, strict=True):
        near(module(*way, need_weights=False)[0], one, 0.02)
    assert calls.count("scaled_dot_product_attention") == 3
    assert calls.count("linear") == (3 + 2 + 3 + 3 if linears else 0)


@pytest.mark.parametrize(
    ("dtype", "given"),
    [(F32, {}), (F64, {}), (BF16, {"need_weights": True}), (BF16, {"need_weights": True, "attn_mask": HIDDEN})],
)
def test_what_is_left_to_torch(dtype, given, calls):
    for batch_first in (True, False):
        module, x = attention(dtype, batch_first=batch_first).eval(), torch.randn(6, 6, WIDTH, dtype=dtype)
        with torch.no_grad():
            expected = module(x, x, x, **{"need_weights": False, **given})
            fuse(module)
            y = module(x, x, x, **{"need_weights": False, **given})
        assert torch.equal(y[0], expected[0])
        assert (y[1] is None) == (expected[1] is None)
        row = module(x[0], x[0], x[0], need_weights=False)[0]
        assert torch.equal(row, type(module).forward(module, x[0], x[0], x[0], need_weights=False)[0])
    assert not calls


def test_what_torch_refuses_is_refused():
    module, x = attention(batch_first=True), torch.randn(2, 6, WIDTH, dtype=BF16)
    ways = ({"is_causal": True}, {"attn_mask": HIDDEN[:3]}, {"key_padding_mask": PADDING[:1]})
    for way in ways:
        with pytest.raises((RuntimeError, AssertionError)) as before:
            module(x, x, x, need_weights=False, **way)
        report = fuse(module)
        with pytest.raises(type(before.value)) as after:
            module(x, x, x, need_weights=False, **way)
        assert str(after.value) == str(before.value)
        report.undo()


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"kdim": 16}, "its keys or values have a different width than its queries"),
        ({"add_zero_attn": True}, "it adds a key and a value (bias_k, bias_v or add_zero_attn)"),
        ({"add_bias_kv": True}, "it adds a key and a value (bias_k, bias_v or add_zero_attn)"),
    ],
)
def test_attention_that_is_kept_says_why(choices, why):
    report = fuse(nn.MultiheadAttention(WIDTH, HEADS, **choices))
    assert [(note.what, note.why) for note in report.kept] == [("MultiheadAttention", why)]
    assert not report.replaced
    narrow = fuse(nn.MultiheadAttention(WIDTH, 8)).kept
    assert narrow[0].why == "its head size is 4: cuDNN supports multiples of 8 up to 256"


def test_dropout_of_attention(calls):
    module, x = attention(dropout=0.5, batch_first=True), torch.randn(2, 6, WIDTH, dtype=BF16)
    fuse(module)
    one, other = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(one, other)
    assert len(calls) == 2
    module.eval()
    one, other = (module(x, x, x, need_weights=False)[0] for _ in range(2))
    assert torch.equal(one, other)


# -- layers -----------------------------------------------------------------------------------------------------------
def encoder(dtype, layers=2, **choices):
    torch.manual_seed(0)
    given = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True, **choices}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **given)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(dtype)


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", nn.GELU(approximate="tanh"), "gelu"], ids=str)
def test_encoders(dtype, norm_first, activation, calls, request):
    """By our ops in training and in eval mode, where torch's one function would pass them by."""
    model, x = encoder(dtype, norm_first=norm_first, activation=activation), torch.randn(2, 6, WIDTH, dtype=dtype)
    tolerance = {F64: 1e-12, F32: 1e-5, BF16: 0.02}[dtype]
    expected = model(x)
    wanted = rows(model, expected)
    # torch's one function computes GELU by erf where the module says tanh, and gives other numbers than in training.
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    torch.backends.mha.set_fastpath_enabled(not isinstance(activation, nn.GELU))
    with torch.no_grad():
        fast = model.eval()(x)
    torch.backends.mha.set_fastpath_enabled(True)
    report = fuse(model)
    assert whats(report.replaced).count(ENCODER) == 2
    assert whats(report.replaced).count(ATTENTION) == 2
    assert whats(report.replaced).count("LayerNorm") == 4
    exact = activation == "gelu"
    assert sum("GELU is the exact one" in note.why for note in report.kept) == (2 if exact else 0)
    each = ["layer_norm"] * 2 * (dtype is not F64) + ["mlp"] * (not exact)
    each += ["scaled_dot_product_attention"] * (dtype is BF16)
    with torch.no_grad():
        near(model(x), fast, tolerance)
    assert sorted(calls) == sorted(each * 2)
    y = model.train()(x)
    assert sorted(calls) == sorted(each * 4)
    near(y, expected, tolerance)
    near(rows(model, y), wanted, 2 * tolerance)
    report.undo()
    assert torch.equal(model(x), expected)
    assert not any("_ff_block" in layer.__dict__ or "forward" in layer.__dict__ for layer in model.modules())


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_masks_of_encoders(dtype):
    model, x = encoder(dtype).eval(), torch.randn(2, 6, WIDTH, dtype=dtype)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=dtype)
    ways = (
        {"mask": causal, "is_causal": True},
        {"mask": HIDDEN},
        {"src_key_padding_mask": PADDING},
        {"mask": HIDDEN, "src_key_padding_mask": PADDING},
    )
    with torch.no_grad():
        expected = [model(x, **way) for way in ways]
        fuse(model)
        for way, one in zip(ways, expected, strict=True):
            near(model(x, **way), one, {F32: 1e-5, BF16: 0.02}[dtype])


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors_are_left_to_torch(calls):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 6, WIDTH)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=PADDING)
        fuse(model)
        assert torch.equal(model(x, src_key_padding_mask=PADDING), expected)
        assert not calls
        model(x)
        assert calls


@pytest.mark.parametrize("dtype", [F64, BF16], ids=str)
def test_decoders(dtype, calls):
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)
    model = nn.TransformerDecoder(layer, 2).to(dtype)
    x, memory = torch.randn(2, 6, WIDTH).to(dtype), torch.randn(2, 9, WIDTH).to(dtype)
    given = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(6, dtype=dtype), "tgt_is_causal": True}
    expected = model(x, memory, **given)
    report = fuse(model)
    assert sorted(set(whats(report.replaced))) == ["LayerNorm", "Linear + ReLU + Linear", ATTENTION]
    y = model(x, memory, **given)
    tolerance = 1e-12 if dtype is F64 else 0.02
    near(y, expected, tolerance)
    near(rows(model, y), rows(model, expected), 2 * tolerance)
    assert calls.count("mlp") == 2
    assert calls.count("scaled_dot_product_attention") == (4 if dtype is BF16 else 0)


def test_dropout_of_layers(calls):
    model, x = encoder(F64, 1, dropout=0.5), torch.randn(2, 6, WIDTH, dtype=F64)
    expected = model.eval()(x)
    fuse(model)
    near(model(x), expected, 1e-12)
    assert calls == ["mlp"]
    one, other = (model.train()(x) for _ in range(2))
    assert not torch.equal(one, other)
    assert calls == ["mlp", "linear", "linear"]


def test_hooks_in_layers():
    model, x, seen = encoder(F64, 1), torch.randn(2, 6, WIDTH, dtype=F64), []
    model.layers[0].linear1.register_forward_hook(lambda *_: seen.append(1))
    report = fuse(model)
    assert ("layers.0.linear1", "linear1 has hooks") in [(note.where, note.why) for note in report.kept]
    model(x)
    assert seen == [1]


def test_copies_and_compiled_encoders(calls):
    torch.compiler.reset()
    model, x = encoder(BF16).eval(), torch.randn(2, 6, WIDTH, dtype=BF16)
    with torch.no_grad():
        expected = model(x)
        fuse(model, linears=True)
        copied = copy.deepcopy(model)
        assert copied.layers[0]._ff_block.__self__ is copied.layers[0]
        near(copied(x), expected, 0.02)
        assert calls.count("mlp") == 2
        near(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected, 0.02)
