"""Attention on the host: what lies behind the end of a sequence, pages, and numbers that are not finite."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import F32, HOST, Arch
from dispatch.ops.sdpa import Diagonal, SdpaBwdRequest, SdpaFwdRequest
from dispatch.ops.sdpa.graph import composed_graph
from dispatch.ops.sdpa.reference import reference
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("attention_by_loops", Path(__file__).with_name("attention_by_loops.py"))
attention = importlib.util.module_from_spec(spec)
spec.loader.exec_module(attention)
MASKS, host = attention.MASKS, attention.host

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
        with pytest.raises(BadRequest, match="v: got NaN or infinity after a sequence's end"):
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
        ("seq_len_kv", [12, 0], "lengths of 1 or more with keys in pages"),
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
    plain, (graph, places, strides) = composed_graph(request), composed_graph(request, by_offsets=True)
    assert plain.strides == ()
    assert [node.kind for node in graph.nodes] == [node.kind for node in plain.graph.nodes]
    names = (*request.reads, *request.writes)
    offset_wires = {uid: strides[place - len(names)] for uid, place in places.items() if place >= len(names)}
    assert sorted(offset_wires.values()) == sorted(set(strides))
    described = {names[place]: graph.wire(uid) for uid, place in places.items() if place < len(names)}
    for name in ("q", "k", "v", "o", "do", "out", "dq", "dk", "dv"):
        if name in described:
            batch, head, token, _ = request.layout_of(name).strides
            wire = described[name]
            assert offset_wires[wire.ragged] == batch
            assert sorted(wire.strides[1:]) == sorted((head, token, 1))
    assert not any(wire.ragged for name, wire in described.items() if name in ("stats", "stats_out", "seq_len_q"))


def test_one_padded_sequence_ends_behind_its_tokens(host):
    """A batch made by `x[None]` steps by 0, and offsets of 0 and 0 would say that it has no token."""
    q = host.zeros((2, 9, 8), "f16")[None]
    length = host.array(np.array([5], np.int32))
    _, _, strides = composed_graph(SdpaFwdRequest(q, q, q, seq_len_q=length, seq_len_kv=length), by_offsets=True)
    assert q.layout.strides[0] == 0
    assert strides == (2 * 9 * 8,)


@pytest.mark.parametrize("by_offsets", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_axes_of_one_element_are_described_as_in_a_tensor_that_was_made_with_them(axis, by_offsets, host, rng):
    """A view such as `x[None]` steps by 0 there."""
    array = rng.standard_normal((2, 9, 8)).astype(np.float16)
    made, lengths = host.array(np.expand_dims(array, axis)), [1] * (1 if axis == 0 else 2)
    view = host.array(array)[(slice(None),) * axis + (None,)]
    assert view.layout.strides[axis] == 0
    stats = host.zeros((*made.shape[:3], 1))
    fields = {f"seq_len_{name}": host.array(np.array(lengths, np.int32)) for name in ("q", "kv")} if by_offsets else {}

    def drawn(x):
        requests = SdpaFwdRequest(x, x, x, **fields), SdpaBwdRequest(x, x, x, x, x, stats, **fields)
        return [composed_graph(request, by_offsets=by_offsets) for request in requests]

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
    graph = composed_graph(request).graph
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
