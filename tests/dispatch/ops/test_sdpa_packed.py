"""Attention on the host over packed sequences: each is one alone, in results and gradients."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import Arch
from dispatch.libraries.cudnn.reference import evaluate
from dispatch.ops.sdpa import Diagonal, SdpaBwdRequest, SdpaFwdRequest, ragged_offsets
from dispatch.ops.sdpa.base import OFFSETS
from dispatch.ops.sdpa.graph import composed_graph
from dispatch.ops.sdpa.packed import unpacked
from dispatch.ops.sdpa.reference import reference
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("attention_by_loops", Path(__file__).with_name("attention_by_loops.py"))
attention = importlib.util.module_from_spec(spec)
spec.loader.exec_module(attention)
host, by_loops, drawn = attention.host, attention.by_loops, attention.drawn

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
    graph, places, _ = composed_graph(request)
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
    offset_wires = np.cumsum([0, *LENGTHS["q"]])
    for number, count in enumerate(LENGTHS["q"]):
        assert np.allclose(
            np.swapaxes(found[number, :, :count], 0, 1), out[offset_wires[number] : offset_wires[number] + count]
        )


@pytest.mark.parametrize(
    ("change", "operand"),
    [
        ({"ragged_k": None}, "ragged_k"),
        ({"ragged_q": None}, "ragged_q"),
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


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_offsets_are_made_from_other_libraries_arrays_too(library, host):
    tensor = np.zeros((9, 3, 4, 8), np.float16)[:, 1]
    if library == "torch":
        tensor = pytest.importorskip("torch").from_numpy(tensor)
    offsets = ragged_offsets((3, 0, 5), tensor)
    assert (offsets.device, offsets.numpy().tolist()) == (host, [0, 288, 288, 768])
    with pytest.raises(BadRequest, match="tensor: got a list; expected a tensor, or an array of another library"):
        ragged_offsets((3, 0, 5), [0.5])


@pytest.mark.parametrize("missing", ["ragged_q", "ragged_k", "ragged_v", "ragged_o"])
def test_offsets_that_are_missing_are_named_before_the_axes(missing, host, rng):
    given = pack(host, drawn(rng))
    others = ", ".join(name for name in ("ragged_q", "ragged_k", "ragged_v", "ragged_o") if name != missing)
    del given[missing]
    with pytest.raises(BadRequest, match=f"{missing}: got nothing; expected offsets of all operands, as in {others}"):
        SdpaFwdRequest(**given)
