"""Every attention row that this GPU can run, through all of its cases, with fresh numbers and poisoned outputs.

A case that a rule of its row refuses must raise NoRow with that reason. Gradients are held against torch's as well.
"""

import itertools

import numpy as np
import pytest

import dispatch
from dispatch.cudnn.formulas import EXACT
from dispatch.cudnn.trial import carry_out
from dispatch.keys import HOST
from dispatch.ops.sdpa import SdpaBwdRequest, SdpaFwdRequest, cases
from dispatch.ops.sdpa.formulas import evaluate

ROWS = [row for row in dispatch.TABLE if row.op.startswith("sdpa_") and row.arch != HOST]
CASES = [pytest.param(row, case, id=f"{row.name}-{case.id}") for row in ROWS for case in cases(row)]


@pytest.fixture
def gpu():
    return dispatch.device("cuda:0")


def skip_unless_for(row, gpu):
    if not row.on(gpu.arch):
        pytest.skip(f"needs {row.arch}, this GPU is {gpu.arch}")


@pytest.mark.parametrize(("row", "case"), CASES)
def test_a_row_passes_a_case_or_refuses_it_with_its_reason(row, case, gpu, rng):
    skip_unless_for(row, gpu)
    carry_out(row, case, gpu, rng)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_repeated_request_is_right_each_time(row, gpu, rng):
    """The second run of the same addresses is recorded and the third is a replay; each reads what is there then."""
    skip_unless_for(row, gpu)
    trial = next(case for case in cases(row) if case.name.endswith("causal gqa")).trial(gpu, rng)
    for _ in range(4):
        for memory in trial.written:
            memory.whole.copy_from(memory.before)
        trial.check(dispatch.run(trial.request))


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
