"""Attention on the host: rows against plain loops, gradients by finite differences, and what is refused."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, NoRow
from dispatch.keys import HOST, Arch
from dispatch.libraries.cudnn.reference import evaluate
from dispatch.ops.sdpa import Diagonal, SdpaBwdRequest, SdpaFwdRequest
from dispatch.ops.sdpa.cases import cases
from dispatch.ops.sdpa.graph import composed_graph
from dispatch.ops.sdpa.reference import reference
from dispatch.row_check import check_row
from dispatch.table.select import select

spec = importlib.util.spec_from_file_location("attention_by_loops", Path(__file__).with_name("attention_by_loops.py"))
attention = importlib.util.module_from_spec(spec)
spec.loader.exec_module(attention)
MASKS, host, by_loops = attention.MASKS, attention.host, attention.by_loops

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


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_host_row_passes_its_cases(row, case, host, rng):
    check_row(row, case, host, rng)


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
    graph, places, _ = composed_graph(request)
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
