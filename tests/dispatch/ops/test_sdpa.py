"""Attention on the host: rows against plain loops, gradients by finite differences, and what is refused."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import F32, HOST, Arch
from dispatch.libraries.cudnn.reference import evaluate
from dispatch.ops.sdpa import Diagonal, SdpaBwdRequest, SdpaFwdRequest, ragged_offsets
from dispatch.ops.sdpa.base import OFFSETS
from dispatch.ops.sdpa.cases import cases
from dispatch.ops.sdpa.graph import composed
from dispatch.ops.sdpa.packed import unpacked
from dispatch.ops.sdpa.reference import reference
from dispatch.row_check import check_row
from dispatch.table.select import select

ROWS = [row for row in dp.TABLE if row.op.startswith("sdpa_") and row.min_arch == HOST]
SMALL = (
    "ones",
    "primes",
    "gqa",
    "mqa",
    "causal bottom",
    "causal window bottom",
    "bias of each",
    "causal bottom lengths",
    "packed together",
    "packed causal bottom",
)
CASES = [
    pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row) if case.name in SMALL
]
MASKS = [
    {},
    {"right_bound": 0},
    {"right_bound": 2},
    {"left_bound": 3},
    {"left_bound": 2, "right_bound": 0},
    {"right_bound": 0, "diagonal": Diagonal.BOTTOM_RIGHT},
    {"left_bound": 3, "right_bound": 1, "diagonal": Diagonal.BOTTOM_RIGHT},
]


@pytest.fixture
def host():
    return dp.device("host")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_host_row_passes_its_cases(row, case, host, rng):
    check_row(row, case, host, rng)


def by_loops(q, k, v, scale, sees, bias):
    """The definition, query by query."""
    b, h, sq, _ = q.shape
    out, stats = np.zeros((b, h, sq, v.shape[3])), np.full((b, h, sq, 1), -np.inf)
    group_k, group_v = h // k.shape[1], h // v.shape[1]
    for i, j, row in itertools.product(range(b), range(h), range(sq)):
        seen = [c for c in range(k.shape[2]) if sees(row, c)]
        if not seen:
            continue
        scores = np.array([scale * q[i, j, row] @ k[i, j // group_k, c] + bias[i, j, row, c] for c in seen])
        stats[i, j, row] = logsumexp(scores)
        out[i, j, row] = np.exp(log_softmax(scores)) @ v[i, j // group_v, seen]
    return out, stats


@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_the_forward_is_its_definition(masks, host, rng):
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 6)))
    bias = rng.standard_normal((1, 4, 5, 7)).astype(np.float16)
    shift = 2 if masks.get("diagonal") is Diagonal.BOTTOM_RIGHT else 0
    right, left = masks.get("right_bound", 100), masks.get("left_bound", 100)

    def sees(row, column):
        return column <= row + shift + right and column > row + shift - left

    request = SdpaFwdRequest(*map(host.array, (q, k, v)), bias=host.array(bias), scale=0.3, stats=True, **masks)
    found = reference(request)
    wide = np.broadcast_to(bias.astype(float), (2, 4, 5, 7))
    out, stats = by_loops(*(a.astype(float) for a in (q, k, v)), 0.3, sees, wide)
    assert np.allclose(found["out"], out)
    assert np.allclose(found["stats_out"], stats)


@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("op", ["sdpa_fwd", "sdpa_bwd"])
def test_the_graph_that_cudnn_gets_computes_the_same(op, masks, host, rng):
    """The chain of operations, evaluated node by node, is the formula; also with shared heads and lengths."""
    q, k, v = (host.array(rng.standard_normal(s), "f16") for s in ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8)))
    lengths = [host.array(np.array(values, np.int32)) for values in ((6, 3), (6, 5))]
    bottom = masks.get("diagonal") is Diagonal.BOTTOM_RIGHT
    given = {} if bottom else {"bias": host.array(rng.standard_normal((1, 4, 6, 6)), "f16")}
    forward = SdpaFwdRequest(q, k, v, seq_len_q=lengths[0], seq_len_kv=lengths[1], stats=True, **given, **masks)
    request, made = forward, reference(forward)
    if op == "sdpa_bwd":
        o, do = (host.array(x, "f16") for x in (made["out"], rng.standard_normal((2, 4, 6, 8))))
        stats = host.array(np.where(np.isfinite(made["stats_out"]), made["stats_out"], 0), "f32")
        request = SdpaBwdRequest(q, k, v, o, do, stats, seq_len_q=lengths[0], seq_len_kv=lengths[1], **given, **masks)
    graph, places, _ = composed(request)
    names = (*request.reads, *request.writes)
    feeds = {}
    for uid, place in places.items():
        tensor = getattr(request, names[place])
        if tensor is not None:
            turned = graph.wire(uid).dims != tensor.shape and tensor.ndim == 4
            array = np.asarray(tensor)
            feeds[uid] = np.swapaxes(array, -1, -2) if turned else array.reshape(graph.wire(uid).dims)
    found = {names[places[uid]]: array for uid, array in evaluate(graph, feeds).items()}
    rows = np.arange(6)[None, None, :, None] < np.array([6, 3]).reshape(2, 1, 1, 1)
    for name, expected in reference(request).items():
        counted = rows if name in ("out", "stats_out") else np.ones((1, 1, 1, 1), bool)
        # A query behind the end sees nothing: its softmax is 0 / 0 in the graph, which engines do not look at.
        assert np.allclose(np.where(counted, found[name], 0), np.where(counted, expected, 0), atol=1e-12), name


@pytest.mark.parametrize("masks", MASKS, ids=str)
def test_gradients_by_finite_differences(masks, host, rng):
    shapes = {"q": (1, 4, 4, 8), "k": (1, 2, 5, 8), "v": (1, 1, 5, 4), "bias": (1, 1, 4, 5)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    if masks.get("diagonal"):
        del arrays["bias"]
    tensors = {name: host.array(array) for name, array in arrays.items()}
    made = reference(SdpaFwdRequest(**tensors, stats=True, **masks))
    do = rng.standard_normal(made["out"].shape).astype(np.float16)
    o, stats = host.array(made["out"], "f16"), host.array(made["stats_out"], "f32")
    backward = SdpaBwdRequest(**tensors, o=o, do=host.array(do), stats=stats, bias_gradient="bias" in tensors, **masks)
    gradients = reference(backward)
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        losses = []
        for step in (1e-2, -1e-2):
            moved = {**arrays, name: array.astype(float) + step * direction}
            exact = by_definition(moved, masks)
            losses.append(np.vdot(do.astype(float), exact))
        slope = (losses[0] - losses[1]) / 2e-2
        assert np.isclose(np.vdot(gradients[f"d{name}"], direction), slope, rtol=2e-2, atol=2e-2), name


def by_definition(arrays, masks):
    """The forward in float64, from arrays."""
    shift = arrays["k"].shape[2] - arrays["q"].shape[2] if masks.get("diagonal") else 0
    right, left = masks.get("right_bound", 100), masks.get("left_bound", 100)
    b, h, sq, d = arrays["q"].shape
    bias = np.broadcast_to(arrays.get("bias", 0), (b, h, sq, arrays["k"].shape[2]))
    q, k, v = (arrays[name].astype(float) for name in "qkv")
    return by_loops(
        q, k, v, 1 / math.sqrt(d), lambda r, c: c <= r + shift + right and c > r + shift - left, bias.astype(float)
    )[0]


@pytest.mark.parametrize(
    ("change", "operand"),
    [
        ({"k": (2, 3, 7, 8)}, "k"),
        ({"k": (2, 4, 7, 16)}, "k"),
        ({"v": (2, 4, 6, 8)}, "v"),
        ({"v": (1, 4, 7, 8)}, "v"),
        ({"q": (2, 4, 8)}, "q"),
        ({"bias": (1, 3, 5, 7)}, "bias"),
        ({"out": (2, 4, 5, 7)}, "out"),
        ({"q": (2, 4, 0, 8)}, "q"),
    ],
)
def test_operands_that_do_not_fit_are_named(change, operand, host):
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 7, 8), "v": (2, 4, 7, 8), **change}
    with pytest.raises(BadRequest) as caught:
        SdpaFwdRequest(**{name: host.zeros(shape, "f16") for name, shape in shapes.items()})
    assert caught.value.operand == operand


def test_lengths_come_in_pairs_and_in_i32(host):
    q = host.zeros((2, 4, 5, 8), "f16")
    with pytest.raises(BadRequest, match="seq_len_kv"):
        SdpaFwdRequest(q, q, q, seq_len_q=host.zeros(2, "i32"))
    with pytest.raises(BadRequest, match="i32\\[2\\]"):
        SdpaFwdRequest(q, q, q, seq_len_q=host.zeros(2, "i64"), seq_len_kv=host.zeros(2, "i32"))


def test_masks_that_engines_get_wrong_are_refused(host):
    q, k = host.zeros((1, 2, 9, 8), "f16"), host.zeros((1, 2, 5, 8), "f16")
    with pytest.raises(NoRow, match="no more queries than keys"):
        select(SdpaFwdRequest(q, k, k, left_bound=3), Arch(90))
    odd, bias = host.zeros((1, 2, 9, 12), "f16"), host.zeros((1, 2, 9, 9), "f16")
    with pytest.raises(NoRow, match="multiple of 8"):
        select(SdpaFwdRequest(odd, odd, odd), Arch(90))
    with pytest.raises(NoRow, match="TOP_LEFT with a bias"):
        select(SdpaFwdRequest(q, q, q, bias=bias, right_bound=0, diagonal=Diagonal.BOTTOM_RIGHT), Arch(90))


def test_a_version_that_gets_gradients_wrong_is_refused(host):
    q, stats = host.zeros((1, 2, 9, 8), "f16"), host.zeros((1, 2, 9, 1), "f32")
    request = SdpaBwdRequest(q, q, q, q, q, stats)
    with pytest.raises(NoRow, match=r"needs cudnn 9\.16, has 9\.15\.1"):
        select(request, Arch(90), {"cudnn": (9, 15, 1)})


def test_dropout_keeps_what_its_seed_says_and_has_the_gradients_of_that(host, rng):
    arrays = {name: rng.standard_normal((2, 3, 16, 8)) for name in "qkv"}
    do = rng.standard_normal((2, 3, 16, 8))
    seed, offset = (host.array(np.array([number])) for number in (7, 11))
    choices = {"dropout": 0.25, "seed": seed, "offset": offset, "right_bound": 0}

    def forward(given):
        tensors = (host.array(array) for array in given.values())
        return reference(SdpaFwdRequest(*tensors, stats=True, mask=True, **choices))

    made = forward(arrays)
    mask = made["mask_out"]
    assert set(np.unique(mask)) == {0.0, 1.0}
    assert abs(mask.mean() - 0.75) < 5 * math.sqrt(0.25 * 0.75 / mask.size)
    assert np.array_equal(forward(arrays)["mask_out"], mask)
    o, stats = host.array(made["out"]), host.array(made["stats_out"], "f32")
    q, k, v = (host.array(array) for array in arrays.values())
    gradients = reference(SdpaBwdRequest(q, k, v, o, host.array(do), stats, **choices))
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        up, down = (forward({**arrays, name: array + step * direction})["out"] for step in (1e-5, -1e-5))
        slope = np.vdot(do, up - down) / 2e-5
        assert np.isclose(np.vdot(gradients[f"d{name}"], direction), slope, rtol=1e-4, atol=1e-4), name


def test_dropout_needs_a_seed_and_an_offset(host):
    q = host.zeros((1, 2, 9, 8), "f16")
    for choices, operand in (
        ({"dropout": 1.0}, "dropout"),
        ({"dropout": 0.1}, "seed"),
        ({"seed": host.zeros(1, "i64")}, "seed"),
        ({"dropout": 0.1, "seed": host.zeros(1, "i64"), "offset": host.zeros(1, "i32")}, "offset"),
        ({"mask": True}, "mask"),
    ):
        with pytest.raises(BadRequest) as caught:
            SdpaFwdRequest(q, q, q, **choices)
        assert caught.value.operand == operand


# -- packed sequences -----------------------------------------------------------------------------------------------
LENGTHS = {"q": (3, 5, 1), "k": (4, 7, 2)}
PACKED_MASKS = [{}, {"right_bound": 0}, {"right_bound": 0, "diagonal": Diagonal.BOTTOM_RIGHT}]


def pack(host, arrays, dtype="f16"):
    """A forward request of packed arrays, whose sequences lie one behind the other."""
    q, k, v = (host.array(arrays[name], dtype) for name in "qkv")
    out = host.zeros((*q.shape[:2], v.shape[2]), dtype)
    offsets = {
        f"ragged_{n}": ragged_offsets(LENGTHS["k" if n in "kv" else "q"], t)
        for n, t in zip("qkvo", (q, k, v, out), strict=True)
    }
    lengths = {f"seq_len_{n}": host.array(np.array(LENGTHS[n[0]], np.int32)) for n in ("q", "kv")}
    return {"q": q, "k": k, "v": v, **offsets, **lengths, "max_q": 5, "max_kv": 8}


def drawn(rng):
    shapes = {"q": (9, 4, 8), "k": (13, 2, 8), "v": (13, 1, 6)}
    return {name: rng.standard_normal(shape).astype(np.float16).astype(float) for name, shape in shapes.items()}


def each_alone(arrays, masks):
    """The forward of every sequence by itself, by loops: O and the statistics."""
    ends = {name: np.cumsum([0, *counts]) for name, counts in LENGTHS.items()}
    outs, stats = [], []
    for number in range(3):
        rows, columns = (slice(ends[n][number], ends[n][number + 1]) for n in "qk")
        q, k, v = (np.swapaxes(arrays[n][columns if n in "kv" else rows], 0, 1)[None] for n in "qkv")
        shift = k.shape[2] - q.shape[2] if masks.get("diagonal") else 0
        right = masks.get("right_bound", 100)
        zero = np.zeros((1, 4, q.shape[2], k.shape[2]))
        out, logarithms = by_loops(q, k, v, 1 / math.sqrt(8), lambda r, c, far=shift + right: c <= r + far, zero)
        outs.append(np.swapaxes(out[0], 0, 1))
        stats.append(logarithms[0, :, :, 0])
    return np.concatenate(outs), stats


@pytest.mark.parametrize("masks", PACKED_MASKS, ids=str)
def test_packed_sequences_are_each_one_alone(masks, host, rng):
    arrays = drawn(rng)
    found = reference(SdpaFwdRequest(**pack(host, arrays), stats=True, **masks))
    out, stats = each_alone(arrays, masks)
    assert np.allclose(found["out"], out)
    for number, logarithms in enumerate(stats):
        assert np.allclose(found["stats_out"][number, :, : logarithms.shape[1], 0], logarithms)


@pytest.mark.parametrize("masks", PACKED_MASKS, ids=str)
def test_gradients_of_packed_sequences_by_finite_differences(masks, host, rng):
    arrays = drawn(rng)
    given = pack(host, arrays, "f64")
    made = reference(SdpaFwdRequest(**given, stats=True, **masks))
    do = rng.standard_normal(made["out"].shape)
    stats = host.array(np.where(np.isfinite(made["stats_out"]), made["stats_out"], 0), "f32")
    request = SdpaBwdRequest(**given, o=host.array(made["out"]), do=host.array(do), stats=stats, **masks)
    gradients = reference(request)
    for name, array in arrays.items():
        direction = rng.standard_normal(array.shape)
        up, down = (each_alone({**arrays, name: array + step * direction}, masks)[0] for step in (1e-5, -1e-5))
        slope = np.vdot(do, up - down) / 2e-5
        assert np.isclose(np.vdot(gradients[f"d{name}"], direction), slope, rtol=1e-4, atol=1e-4), name


def test_the_graph_of_packed_sequences_computes_the_same(host, rng):
    """Every packed wire names its offsets, and the chain on sequences taken apart gives the packed result."""
    request = SdpaFwdRequest(**pack(host, drawn(rng)), right_bound=0)
    graph, places, _ = composed(request)
    names = {uid: (*request.reads, *request.writes)[place] for uid, place in places.items()}
    for uid, name in names.items():
        ragged = graph.wire(uid).ragged
        assert names.get(ragged, "") == {"q": "ragged_q", "k": "ragged_k", "v": "ragged_v", "out": "ragged_o"}.get(
            name, ""
        )
    feeds = {}
    for uid, name in names.items():
        if name != "out" and name not in OFFSETS:
            array = unpacked(request, name, np.asarray(getattr(request, name)))
            feeds[uid] = np.swapaxes(array, -1, -2) if name == "k" else array.reshape(graph.wire(uid).dims)
    (found,) = evaluate(graph, feeds).values()
    out = reference(request)["out"]
    starts = np.cumsum([0, *LENGTHS["q"]])
    for number, count in enumerate(LENGTHS["q"]):
        assert np.allclose(np.swapaxes(found[number, :, :count], 0, 1), out[starts[number] : starts[number] + count])


@pytest.mark.parametrize(
    ("change", "operand"),
    [
        ({"ragged_k": None}, "ragged_k"),
        ({"ragged_q": None}, "q"),
        ({"ragged_v": np.zeros(3, np.int32)}, "ragged_v"),
        ({"ragged_v": np.zeros(4, np.int64)}, "ragged_v"),
        ({"ragged_o": np.zeros(4, np.float32)}, "ragged_o"),
        ({"max_q": None}, "max_q"),
        ({"max_kv": 14}, "max_kv"),
        ({"seq_len_q": None, "seq_len_kv": None}, "seq_len_q"),
        ({"seq_len_q": np.zeros(4, np.int32)}, "seq_len_q"),
    ],
)
def test_what_does_not_fit_of_packed_sequences_is_named(change, operand, host, rng):
    arrays = {name: host.array(value) if isinstance(value, np.ndarray) else value for name, value in change.items()}
    with pytest.raises(BadRequest) as caught:
        SdpaFwdRequest(**{**pack(host, drawn(rng)), **arrays})
    assert caught.value.operand == operand


@pytest.mark.parametrize(
    ("change", "operand"),
    [
        ({"ragged_k": np.array([0, 64, 192, 224], np.int32)}, "ragged_k"),  # the third ends behind the tokens
        ({"ragged_q": np.array([0, 64, 256, 288], np.int32)}, "ragged_q"),  # the first two overlap
        ({"ragged_o": np.array([0, 97, 256, 288], np.int32)}, "ragged_o"),  # between two tokens
        ({"seq_len_kv": np.array([4, 9, 2], np.int32)}, "seq_len_kv"),  # longer than max_kv
    ],
)
def test_the_host_reads_offsets_before_it_follows_them(change, operand, host, rng):
    arrays = {**drawn(rng), "v": rng.standard_normal((13, 1, 8))}
    request = SdpaFwdRequest(**{**pack(host, arrays), **{n: host.array(a) for n, a in change.items()}})
    with pytest.raises(BadRequest) as caught:
        dp.run(request)
    assert caught.value.operand == operand


def test_offsets_fit_into_their_tensor_and_count_its_elements(host):
    tensor = host.zeros((9, 3, 4, 8), "f16")[:, 1]
    assert ragged_offsets((3, 0, 5), tensor).numpy().tolist() == [0, 288, 288, 768]
    with pytest.raises(BadRequest, match="lengths"):
        ragged_offsets((5, 5), tensor)


def test_packed_sequences_need_sm_90(host, rng):
    request = SdpaFwdRequest(**{**pack(host, drawn(rng)), "v": host.zeros((13, 2, 8), "f16")})
    assert select(request, Arch(90)).min_arch == Arch(90)
    with pytest.raises(NoRow, match="sequences that are not packed") as refused:
        select(request, Arch(80))
    assert any("needs sm_90" in str(reason) for _, why in refused.value.tried for reason in why)


def test_packed_tokens_and_heads_start_at_16_bytes(host, rng):
    given = pack(host, {**drawn(rng), "v": rng.standard_normal((13, 2, 8))})
    select(SdpaFwdRequest(**given), Arch(90))
    odd = host.zeros((13, 2, 12), "f16")[..., :8]
    with pytest.raises(NoRow, match="needs k and its tokens and heads at multiples of 16 bytes"):
        select(SdpaFwdRequest(**{**given, "k": odd, "ragged_k": ragged_offsets(LENGTHS["k"], odd)}), Arch(90))


def test_the_gradient_of_one_score_is_refused_before_it_ends_the_process(host):
    one, stats = host.zeros((2, 4, 1, 8), "f16"), host.zeros((2, 4, 1, 1), "f32")
    select(SdpaFwdRequest(one, one, one), Arch(90))
    with pytest.raises(NoRow, match="needs two queries or two keys or more"):
        select(SdpaBwdRequest(one, one, one, one, one, stats), Arch(90))


# -- what lies behind the end of a sequence, and numbers that are not finite ------------------------------------------
BEHIND = {"q": (5, 0, 3), "kv": (7, 4, 0)}  # lengths: full, without queries, without keys


def padded(host, rng):
    """Operands of three sequences by name, where each lies behind its end, and the fields that say so."""
    shapes = {"q": (3, 4, 5, 8), "k": (3, 2, 7, 8), "v": (3, 2, 7, 8), "o": (3, 4, 5, 8), "do": (3, 4, 5, 8)}
    arrays = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    arrays["stats"] = rng.standard_normal((3, 4, 5, 1)).astype(np.float32)
    ends = {name: np.array(BEHIND["kv" if name in "kv" else "q"]).reshape(3, 1, 1, 1) for name in arrays}
    outside = {n: np.broadcast_to(np.arange(a.shape[2])[:, None] >= ends[n], a.shape) for n, a in arrays.items()}
    fields = {f"seq_len_{n}": host.array(np.array(lengths, np.int32)) for n, lengths in BEHIND.items()}
    return arrays, outside, fields


@pytest.mark.parametrize("masks", MASKS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_lies_behind_the_end_of_a_sequence_does_not_matter(value, masks, host, rng):
    arrays, outside, fields = padded(host, rng)

    def run(changed):
        given = {
            n: host.array(np.where(outside[n], a.dtype.type(value), a) if n == changed else a)
            for n, a in arrays.items()
        }
        found = dp.sdpa_fwd(*(given[n] for n in "qkv"), **fields, stats=True, **masks)
        return [t.numpy() for t in (*found, *dp.sdpa_bwd(**given, **fields, **masks))]

    clean = run("")
    assert all(np.isfinite(part).all() for part in (clean[0], *clean[2:]))
    for name in arrays:
        for got, wanted in zip(run(name), clean, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=name)


def test_an_empty_sequence_gives_zeros(host, rng):
    arrays, _, fields = padded(host, rng)
    tensors = {name: host.array(array) for name, array in arrays.items()}
    out, stats = dp.sdpa_fwd(*(tensors[n] for n in "qkv"), **fields, stats=True)
    dq, dk, dv = (t.numpy() for t in dp.sdpa_bwd(**tensors, **fields))
    for number in (1, 2):  # without queries, and without keys
        assert not any(part[number].any() for part in (out.numpy(), dq, dk, dv))
        assert np.isneginf(stats.numpy()[number]).all()
    assert all(part[0].all() for part in (out.numpy(), dq, dk, dv))


def paged(host, rng):
    """K and V of two sequences in pages of 4, of which the second is not full, and which places nobody has."""
    k, v = (rng.standard_normal((7, 2, 4, 8)).astype(np.float16) for _ in "kv")
    table = np.array([[5, 0, 3], [1, 6, 2]], np.int32)
    unused = np.ones((7, 4), bool)
    for number, length in enumerate((12, 6)):
        for place in range(length):
            unused[table[number, place // 4], place % 4] = False
    fields = {"page_table_k": host.array(table), "page_table_v": host.array(table)}
    fields |= {f"seq_len_{n}": host.array(np.array(values, np.int32)) for n, values in (("q", (2, 1)), ("kv", (12, 6)))}
    return {"q": rng.standard_normal((2, 4, 2, 8)).astype(np.float16), "k": k, "v": v}, unused[:, None, :, None], fields


def test_pages_hide_nothing_that_a_sequence_has(host, rng):
    """NaN in a page is NaN in the results of its sequence's heads; behind the end K is nothing, and V is refused."""
    arrays, unused, fields = paged(host, rng)

    def run(**changed):
        tensors = {name: host.array(array) for name, array in {**arrays, **changed}.items()}
        return dp.sdpa_fwd(**tensors, **fields).numpy()

    clean = run()
    for value in (np.nan, np.inf):
        garbage = {name: np.where(unused, value, arrays[name]).astype(np.float16) for name in "kv"}
        np.testing.assert_array_equal(run(k=garbage["k"]), clean)
        with pytest.raises(BadRequest, match="v: got NaN or infinity behind a sequence's end"):
            run(v=garbage["v"])
    for name in "kv":
        inside = arrays[name].copy()
        inside[6, 1, 1, 3] = np.nan  # of the second sequence, the second half of the heads
        got = run(**{name: inside})
        hit = np.isnan(got)
        assert hit[1, 2:, :1, 3].all()
        assert not hit[0].any()
        assert not hit[1, :2].any()
        np.testing.assert_array_equal(got[0], clean[0])
    for number in (-1, 7, 2**31 - 1):  # the second sequence has no third page
        table = host.array(np.array([[5, 0, 3], [1, 6, number]], np.int32))
        fields |= {"page_table_k": table, "page_table_v": table}
        np.testing.assert_array_equal(run(), clean)


def test_a_query_with_a_score_that_is_not_finite_has_no_weights_that_are(host, rng):
    """NaN among its scores, or +∞, leaves a query nothing; -∞ is a key that it does not see."""
    q, k, v = (rng.standard_normal((1, 1, 5, 8)) for _ in "qkv")
    for value, hit in ((np.nan, True), (np.inf, True), (-np.inf, False)):
        bias = np.zeros((1, 1, 5, 5))
        bias[0, 0, 2, 3] = value
        out, stats = dp.sdpa_fwd(*(host.array(a, "f16") for a in (q, k, v)), bias=host.array(bias, "f16"), stats=True)
        assert np.isnan(out.numpy()[0, 0]).all(axis=-1).tolist() == [False, False, hit, False, False]
        assert np.isfinite(stats.numpy()[0, 0, :, 0]).tolist() == [True, True, not hit, True, True]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("seq_len_q", [3, 0], "lengths from 0 to 2"),
        ("seq_len_kv", [13, 0], "lengths from 0 to 12"),
        ("seq_len_kv", [-1, 6], "lengths from 0 to 12"),
        ("seq_len_kv", [12, 0], "lengths of 1 or more where keys are in pages"),
        ("page_table_k", [[5, 0, 7], [1, 6, 2]], "pages from 0 to 6 of k"),
        ("page_table_v", [[5, 0, 3], [1, -1, 2]], "pages from 0 to 6 of v"),
    ],
)
def test_the_host_looks_at_lengths_and_pages_before_it_follows_them(field, value, expected, host, rng):
    arrays, _, fields = paged(host, rng)
    fields[field] = host.array(np.array(value, np.int32))
    with pytest.raises(BadRequest, match=expected) as caught:
        dp.sdpa_fwd(**{name: host.array(array) for name, array in arrays.items()}, **fields)
    assert caught.value.operand == field


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
@pytest.mark.parametrize("op", ["sdpa_fwd", "sdpa_bwd"])
def test_padded_sequences_are_described_each_from_its_own_start(op, order, host, rng):
    """Each operand of the graph has the offsets of its sequences: multiples of the stride of its batch."""
    arrays, _, fields = padded(host, rng)

    def lay(array):
        return host.array(np.ascontiguousarray(array.transpose(order))).transpose(*np.argsort(order).tolist())

    tensors = {name: host.array(a) if name == "stats" else lay(a) for name, a in arrays.items()}
    forward = SdpaFwdRequest(*(tensors[n] for n in "qkv"), **fields, stats=True)
    request = forward if op == "sdpa_fwd" else SdpaBwdRequest(**tensors, **fields)
    plain, (graph, places, strides) = composed(request), composed(request, apart=True)
    assert plain.strides == ()
    assert [node.kind for node in graph.nodes] == [node.kind for node in plain.graph.nodes]
    names = (*request.reads, *request.writes)
    starts = {uid: strides[place - len(names)] for uid, place in places.items() if place >= len(names)}
    assert sorted(starts.values()) == sorted(set(strides))
    described = {names[place]: graph.wire(uid) for uid, place in places.items() if place < len(names)}
    for name in ("q", "k", "v", "o", "do", "out", "dq", "dk", "dv"):
        if name in described:
            batch, head, token, _ = request.layout_of(name).strides
            wire = described[name]
            assert starts[wire.ragged] == batch
            assert sorted(wire.strides[1:]) == sorted((head, token, 1))
    assert not any(wire.ragged for name, wire in described.items() if name in ("stats", "stats_out", "seq_len_q"))


def test_one_padded_sequence_ends_behind_its_tokens(host):
    """A batch made by `x[None]` steps by 0, and offsets of 0 and 0 would say that it has no token."""
    q = host.zeros((2, 9, 8), "f16")[None]
    length = host.array(np.array([5], np.int32))
    _, _, strides = composed(SdpaFwdRequest(q, q, q, seq_len_q=length, seq_len_kv=length), apart=True)
    assert q.layout.strides[0] == 0
    assert strides == (2 * 9 * 8,)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes_of_one_element_are_described_as_in_a_tensor_that_was_made_with_them(axis, apart, host, rng):
    """A view such as `x[None]` steps by 0 there."""
    array = rng.standard_normal((2, 9, 8)).astype(np.float16)
    made, lengths = host.array(np.expand_dims(array, axis)), [1] * (1 if axis == 0 else 2)
    view = host.array(array)[(slice(None),) * axis + (None,)]
    assert view.layout.strides[axis] == 0
    stats = host.zeros((*made.shape[:3], 1))
    fields = {f"seq_len_{name}": host.array(np.array(lengths, np.int32)) for name in ("q", "kv")} if apart else {}

    def drawn(x):
        requests = SdpaFwdRequest(x, x, x, **fields), SdpaBwdRequest(x, x, x, x, x, stats, **fields)
        return [composed(request, apart=apart) for request in requests]

    def steps(wire):
        """Of axes with more than one element; sequences by offsets have no step of their own."""
        pairs = list(zip(wire.dims, wire.strides, strict=True))[1 if wire.ragged else 0 :]
        return [step for extent, step in pairs if extent > 1]

    for one, other in zip(drawn(view), drawn(made), strict=True):
        assert [steps(wire) for wire in one.graph.wires] == [steps(wire) for wire in other.graph.wires]
        assert one.strides == other.strides
        assert min(step for wire in one.graph.wires for step in wire.strides) > 0


@pytest.mark.parametrize("bound", [100, 2**31 - 1, 2**32, 2**40])
@pytest.mark.parametrize("diagonal", list(Diagonal))
@pytest.mark.parametrize("name", ["left_bound", "right_bound"])
@pytest.mark.parametrize("op", ["sdpa_fwd", "sdpa_bwd"])
def test_a_bound_beyond_every_score_hides_nothing_and_stays_within_i32(op, name, diagonal, bound, host, rng):
    """The graph's indices are i32, and so are the numbers that are added to them: 2**32 would be 0 there."""
    arrays, _, fields = padded(host, rng)
    tensors = {key: host.array(array) for key, array in arrays.items()}
    masks = {name: bound, "diagonal": diagonal}

    def ask(**masks):
        if op == "sdpa_bwd":
            return SdpaBwdRequest(**tensors, **fields, **masks)
        return SdpaFwdRequest(*(tensors[key] for key in "qkv"), **fields, **masks)

    request, whole = ask(**masks), reference(ask())
    for key, expected in reference(request).items():
        np.testing.assert_array_equal(expected, whole[key])
    sq, skv = request.scores[2:]
    graph = composed(request).graph
    numbers = [wire.value for wire in graph.wires if wire.value is not None and wire.dtype is not F32]
    assert all(number == np.int32(min(number, sq + skv)) for number in numbers)
    masked = [node for node in graph.nodes if node.has("MODE") and node.get("MODE") in ("CMP_GE", "CMP_GT")]
    assert len(masked) == 1


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e39, -1e39, 1e400, True, "1", 1j], ids=repr)
def test_a_scale_is_a_number_that_f32_holds(scale, host):
    q = host.zeros((1, 2, 9, 8), "f16")
    with pytest.raises(BadRequest, match="scale"):
        SdpaFwdRequest(q, q, q, scale=scale)
    with pytest.raises(BadRequest, match="scale"):
        SdpaBwdRequest(q, q, q, q, q, host.zeros((1, 2, 9, 1)), scale=scale)


@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -0.125, 1e-45])
def test_a_scale_is_above_0(scale, host):
    """cuDNN gives NaN with others, and not with every mask; so the host takes none either."""
    q = host.zeros((1, 2, 9, 8), "f16")
    backward = SdpaBwdRequest(q, q, q, q, q, host.zeros((1, 2, 9, 1)), scale=scale)
    for request in (SdpaFwdRequest(q, q, q, scale=scale), backward):
        for arch in (HOST, Arch(90)):
            with pytest.raises(NoRow, match="needs a scale of"):
                select(request, arch)
    select(SdpaFwdRequest(q, q, q, scale=1e-30), Arch(90))


def test_fp8_results_are_saturated(host):
    """An infinite O of fp8 is the largest number, as on a GPU, and NaN stays NaN."""
    one = np.ones((1, 1, 2, 16))
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    for scale, value in ((1e6, 448.0), (-1e6, -448.0), (np.inf, 448.0), (np.nan, np.nan)):
        factors = {name: host.array(np.ones(1), "f32") for name in names}
        factors["scale_o"] = host.array(np.full(1, scale), "f32")
        q = host.array(one, "f8e4m3")
        np.testing.assert_array_equal(dp.sdpa_fwd(q, q, q, **factors).numpy().astype(float), np.full(one.shape, value))
