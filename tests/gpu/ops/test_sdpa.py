"""Every attention row that this GPU can run, through all of its cases, with fresh numbers and poisoned outputs.

A case that a rule of its row refuses must raise NoRow with that reason. Gradients are held against torch's as well.
"""

import itertools

import numpy as np
import pytest

import dispatch
from dispatch.core.host_plan import EXACT
from dispatch.keys import HOST
from dispatch.ops.sdpa import SdpaBwdRequest, SdpaFwdRequest
from dispatch.ops.sdpa.cases import cases
from dispatch.ops.sdpa.reference import evaluate
from dispatch.row_check import check_row

ROWS = [row for row in dispatch.TABLE if row.op.startswith("sdpa_") and row.min_arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    return dispatch.device("cuda:0")


def skip_unless_for(row, gpu):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.min_arch}, this GPU is {gpu.arch}")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, gpu, rng):
    skip_unless_for(row, gpu)
    check_row(row, case, gpu, rng)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_repeated_request_is_right_each_time(row, gpu, rng):
    """The second run of the same addresses is recorded and the third is a replay; each reads what is there then."""
    skip_unless_for(row, gpu)
    check = next(case for case in cases(row) if case.name.endswith("causal gqa")).check(gpu, rng)
    for _ in range(4):
        check.renew()
        check.verify(dispatch.run(check.request))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_against_torch(causal, gpu, rng):
    """Forward and backward in a row, on what the forward gave back, against autograd of the same operands in f32."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    b, h, s, d = 2, 4, 200, 64
    arrays = [rng.standard_normal((b, h, s, d)).astype(np.float16) for _ in range(4)]
    q, k, v, do = (gpu.array(array) for array in arrays)
    bound = 0 if causal else None
    o, stats = dispatch.sdpa_fwd(q, k, v, right_bound=bound, stats=True)
    ours = dispatch.sdpa_bwd(q, k, v, o, do, stats, right_bound=bound)
    given = [torch.from_numpy(array).float().cuda().requires_grad_() for array in arrays[:3]]
    expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal)
    expected.backward(torch.from_numpy(arrays[3]).float().cuda())
    for mine, theirs in zip((o, *ours), (expected, *(t.grad for t in given)), strict=True):
        wanted = theirs.detach().cpu().numpy()
        assert np.abs(mine.numpy().astype(np.float32) - wanted).max() <= 2.0**-8 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["i32", "i64"])
def test_packed_sequences_against_torch_one_by_one(kind, gpu, rng):
    """Forward and backward over views of one packed tensor, each sequence against autograd of it alone in f32."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    counts, heads, d = (37, 200, 1, 128), 4, 64
    array = rng.standard_normal((sum(counts), 3, heads, d)).astype(np.float16)
    do = rng.standard_normal((sum(counts), heads, d)).astype(np.float16)
    whole = gpu.array(array)
    q, k, v = (whole[:, number] for number in range(3))
    ends = np.cumsum([0, *counts])
    inner, outer = (gpu.array(ends * step, kind) for step in (3 * heads * d, heads * d))
    lengths = gpu.array(np.array(counts, np.int32))
    shared = {"seq_len_q": lengths, "seq_len_kv": lengths, "max_q": 200, "max_kv": 200, "right_bound": 0}
    shared |= {"ragged_q": inner, "ragged_k": inner, "ragged_v": inner, "ragged_o": outer}
    o, stats = dispatch.sdpa_fwd(q, k, v, stats=True, **shared)
    ours = [t.numpy().astype(np.float32) for t in (o, *dispatch.sdpa_bwd(q, k, v, o, gpu.array(do), stats, **shared))]
    for start, end in itertools.pairwise(ends):
        given = [torch.from_numpy(array[start:end, n]).float().cuda().transpose(0, 1).contiguous() for n in range(3)]
        given = [tensor.requires_grad_() for tensor in given]
        expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
        expected.backward(torch.from_numpy(do[start:end]).float().cuda().transpose(0, 1))
        for mine, theirs in zip(ours, (expected, *(t.grad for t in given)), strict=True):
            wanted = theirs.detach().cpu().numpy().swapaxes(0, 1)
            assert np.abs(mine[start:end] - wanted).max() <= 2.0**-8 * max(np.abs(wanted).max(), 1)


def test_a_deterministic_gradient_is_the_same_bit_for_bit(gpu, rng):
    q, k, v, do = (gpu.array(rng.standard_normal((2, 4, 300, 64)), "bf16") for _ in range(4))
    o, stats = dispatch.sdpa_fwd(q, k, v, stats=True)
    runs = [
        b"".join(t.numpy().tobytes() for t in dispatch.sdpa_bwd(q, k, v, o, do, stats, deterministic=True))
        for _ in range(5)
    ]
    assert len(set(runs)) == 1


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_keeps_the_same_for_the_same_seed_and_its_gradients_fit(dtype, causal, gpu, rng):
    q, k, v, do = (gpu.array(rng.standard_normal((2, 3, 131, 64)), dtype) for _ in range(4))
    seed, offset, other = (gpu.array(np.array([number])) for number in (7, 11, 12))
    choices = {"dropout": 0.2, "seed": seed, "right_bound": 0 if causal else None}
    forward = SdpaFwdRequest(q, k, v, stats=True, mask=True, offset=offset, **choices)
    o, stats, mask = dispatch.run(forward)
    kept = mask.numpy()
    assert set(np.unique(kept)) <= {0.0, 1.0}
    counted = np.tri(131, dtype=bool) if causal else np.ones((131, 131), bool)  # what no query sees need not be drawn
    assert abs(kept[..., counted].mean() - 0.8) < 5 * np.sqrt(0.16 / (6 * counted.sum()))
    again = dispatch.run(forward)
    assert np.array_equal(again[2].numpy()[..., counted], kept[..., counted])
    assert again[0].numpy().tobytes() == o.numpy().tobytes()
    moved = dispatch.run(SdpaFwdRequest(q, k, v, stats=True, mask=True, offset=other, **choices))
    assert not np.array_equal(moved[2].numpy()[..., counted], kept[..., counted])
    expected = evaluate(forward, EXACT, kept)["out"]
    roundoff = 2.0**-7 if dtype == "bf16" else 2.0**-10
    assert np.abs(o.numpy().astype(float) - expected).max() <= 2 * roundoff * np.abs(expected).max()
    backward = SdpaBwdRequest(q, k, v, o, do, stats, offset=offset, **choices)
    for tensor, wanted in zip(dispatch.run(backward), evaluate(backward, EXACT, kept).values(), strict=True):
        assert np.abs(tensor.numpy().astype(float) - wanted).max() <= 4 * roundoff * np.abs(wanted).max()


# -- what lies behind the end of a sequence ---------------------------------------------------------------------------
LENGTHS = {"q": (65, 0, 33, 20), "kv": (131, 77, 0, 5)}  # full, without queries, without keys, short
BEHIND = [
    {},
    {"right_bound": 0},
    {"left_bound": 17, "right_bound": 0},
    {"bias": True},
]


def padded(rng, order):
    """Operands of four sequences by name, where each lies behind its end, and how they lie in memory."""
    shapes = {"q": (4, 6, 65, 40), "k": (4, 2, 131, 40), "v": (4, 2, 131, 40), "do": (4, 6, 65, 40)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    ends = {name: np.array(LENGTHS["kv" if name in "kv" else "q"]).reshape(4, 1, 1, 1) for name in arrays}
    outside = {n: np.broadcast_to(np.arange(a.shape[2])[:, None] >= ends[n], a.shape) for n, a in arrays.items()}

    def lay(gpu, array):
        return gpu.array(np.ascontiguousarray(array.transpose(order))).transpose(*np.argsort(order).tolist())

    return arrays, outside, lay


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("masks", BEHIND, ids=str)
def test_what_lies_behind_the_end_of_a_padded_sequence_does_not_matter(masks, order, gpu, rng):
    """NaN there changes no bit, forward and backward, called and replayed; behind the end results are 0."""
    arrays, outside, lay = padded(rng, order)
    fields = {f"seq_len_{n}": gpu.array(np.array(lengths, np.int32)) for n, lengths in LENGTHS.items()}
    fields |= {name: value for name, value in masks.items() if name != "bias"}
    if "bias" in masks:
        fields["bias"] = gpu.array(rng.standard_normal((1, 6, 65, 131)), "f16")

    def run(**changed):
        given = {n: lay(gpu, np.where(outside[n], changed.get(n, 0), a).astype(np.float16)) for n, a in arrays.items()}
        out, made = (gpu.array(np.full(arrays["q"].shape, np.nan), "f16") for _ in range(2))
        forward = SdpaFwdRequest(given["q"], given["k"], given["v"], out=out, stats=True, **fields)
        o, stats = [dispatch.run(forward) for _ in range(3)][-1]
        behind = np.where(outside["q"][..., :1], changed.get("stats", -np.inf), stats.numpy()).astype(np.float32)
        behind = np.where(np.isneginf(behind) & ~outside["q"][..., :1], 0, behind)
        dead = gpu.array(np.where(outside["q"], changed.get("o", 0), o.numpy()).astype(np.float16))
        gradients = {"dq": made, "dk": gpu.array(np.full(arrays["k"].shape, np.nan), "f16")}
        backward = SdpaBwdRequest(**{n: given[n] for n in "qkv"}, o=dead, do=given["do"], stats=gpu.array(behind),
                                  deterministic=True, **gradients, **fields)  # fmt: skip
        parts = [dispatch.run(backward) for _ in range(3)][-1]
        return [t.numpy() for t in (o, stats, *parts)]

    clean = run()
    masked = {name: outside[name] for name in "qk"}
    assert not any(part[masked[name]].any() for part, name in zip((clean[0], *clean[2:]), "qqkk", strict=True))
    assert np.isneginf(clean[1][outside["q"][..., :1]]).all()
    for number in (1, 2):  # a sequence without queries, and one without keys
        assert not any(part[number].any() for part in (clean[0], *clean[2:]))
    for name in ("q", "k", "v", "do", "o", "stats"):
        for got, wanted in zip(run(**{name: np.nan}), clean, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=f"NaN behind the end in {name}")


@pytest.mark.parametrize("width", [40, 64, 128])
@pytest.mark.parametrize("masks", [{}, {"right_bound": 0}, {"right_bound": 0, "diagonal": 1}], ids=str)
def test_of_one_query_nothing_behind_the_end_of_the_keys_matters(masks, width, gpu, rng):
    """These are described as padded, for that is faster; their engine reads no key behind the end."""
    keys = np.array([300, 131, 0, 1, 128], np.int32) if not masks else np.array([300, 131, 77, 1, 128], np.int32)
    if "diagonal" in masks:
        masks = {**masks, "diagonal": dispatch.Diagonal(masks["diagonal"])}
    q, k, v = (rng.standard_normal((5, h, s, width)).astype(np.float16) for h, s in ((8, 1), (2, 300), (2, 300)))
    behind = (np.arange(300)[:, None] >= keys.reshape(5, 1, 1, 1)) & np.ones(k.shape, bool)
    fields = {"seq_len_q": gpu.array(np.ones(5, np.int32)), "seq_len_kv": gpu.array(keys)}

    def run(**changed):
        given = [gpu.array(np.where(behind, changed.get(n, 0), a).astype(np.float16)) for n, a in (("k", k), ("v", v))]
        request = SdpaFwdRequest(
            gpu.array(q), *given, out=gpu.array(np.full(q.shape, np.nan), "f16"), **fields, **masks
        )
        return [dispatch.run(request) for _ in range(3)][-1].numpy(), evaluate(request, EXACT)["out"]

    # Not bit by bit: beside other work on the GPU one of these elements was another last bit in one of some runs.
    for changed in ({}, *({name: value} for name in "kv" for value in (np.nan, np.inf))):
        got, expected = run(**changed)
        assert np.abs(got - expected).max() <= 2.0**-9 * 4, changed


@pytest.mark.parametrize("autotune", [False, True])
def test_padded_sequences_are_right_where_some_are_empty(autotune, gpu, rng):
    arrays, outside, lay = padded(rng, (0, 2, 1, 3))
    fields = {f"seq_len_{n}": gpu.array(np.array(lengths, np.int32)) for n, lengths in LENGTHS.items()}
    given = [lay(gpu, np.where(outside[n], np.nan, arrays[n]).astype(np.float16)) for n in "qkv"]
    request = SdpaFwdRequest(*given, stats=True, right_bound=0, autotune=autotune, **fields)
    out, stats = (t.numpy().astype(np.float64) for t in dispatch.run(request))
    expected = evaluate(request, EXACT)
    assert np.abs(out - expected["out"]).max() <= 2.0**-9 * np.abs(expected["out"]).max()
    seen = np.isfinite(expected["stats_out"])
    assert np.abs(stats[seen] - expected["stats_out"][seen]).max() <= 1e-2
    assert np.isneginf(stats[~seen]).all()


def test_packed_sequences_without_keys_give_zeros_and_what_lies_between_does_not_matter(gpu, rng):
    counts, keys, gap = (40, 9, 33), (70, 0, 5), 3
    starts = {n: np.cumsum([0, *(c + gap for c in lengths)]) for n, lengths in (("q", counts), ("k", keys))}
    arrays = {n: np.full((starts["q" if n == "q" else "k"][-1], 4, 64), np.nan, np.float16) for n in "qkv"}
    for n, array in arrays.items():
        which, lengths = ("q", counts) if n == "q" else ("k", keys)
        for start, count in zip(starts[which], lengths, strict=False):
            array[start : start + count] = rng.standard_normal((count, 4, 64))
    offsets = {f"ragged_{n}": gpu.array((starts["q" if n in "qo" else "k"] * 256).astype(np.int32)) for n in "qkvo"}
    fields = {"seq_len_q": counts, "seq_len_kv": keys}
    fields = {n: gpu.array(np.array(lengths, np.int32)) for n, lengths in fields.items()} | offsets
    out = gpu.array(np.full(arrays["q"].shape, np.nan), "f16")
    tensors = [gpu.array(arrays[n]) for n in "qkv"]
    request = SdpaFwdRequest(*tensors, out=out, max_q=64, max_kv=72, **fields)
    got = dispatch.run(request).numpy().astype(np.float64)
    expected = evaluate(request, EXACT)["out"]
    for start, count in zip(starts["q"], counts, strict=False):
        assert np.abs(got - expected)[start : start + count].max() <= 2.0**-9 * 4
    assert not got[starts["q"][1] : starts["q"][1] + counts[1]].any()
