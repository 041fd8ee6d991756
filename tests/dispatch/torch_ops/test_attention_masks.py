"""Masks, dropout and shared heads of `dispatch.torch.scaled_dot_product_attention` beside torch's own in f64."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
attention = pytest.importorskip("dispatch.torch.attention")
attend = attention.scaled_dot_product_attention
theirs = torch.nn.functional.scaled_dot_product_attention
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

DTYPES = (torch.float16, torch.bfloat16)
SHAPES = ((2, 4, 6, 9), (1, 4, 6, 9), (2, 1, 6, 9), (6, 9), (1, 9), (2, 1, 1, 9), (9,), (6, 1), (4, 1, 1), ())


def operands(dtype=torch.bfloat16, queries=6, keys=9, heads=(4, 2), head=16, batch=2):
    torch.manual_seed(0)
    shapes = ((heads[0], queries, head), (heads[1], keys, head), (heads[1], keys, head))
    return [torch.randn(batch, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def agree(given, mask, expected_mask, *masks):
    """The same results and gradients, also by masks that have one."""
    wide = beside.mapped_to_f64(given)
    scores = (*given[0].shape[:3], given[1].shape[2])  # torch takes no mask of fewer than two axes
    y, expected = attend(*given, mask), theirs(*wide, expected_mask.broadcast_to(scores), enable_gqa=True)
    ours = beside.gradients(y, [*given, *masks[:1]])
    others = beside.gradients(expected, [*wide, *masks[1:]])
    beside.close([y, *ours], [expected, *others], 48 * torch.finfo(y.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_of_bools(shape, dtype):
    torch.manual_seed(3)
    mask = torch.rand(shape) < 0.6
    agree(operands(dtype), mask, mask)
    agree(operands(dtype), mask | True, mask | True)


def test_a_query_that_sees_no_key_gets_0():
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[2] = False
    mask[:, 4] = False
    numbers = torch.zeros(6, 9).masked_fill(~mask, -torch.inf)
    for given in (operands(torch.float16), operands(torch.bfloat16)):
        for one, other in ((mask, mask), (numbers.to(given[0].dtype), numbers.double())):
            agree(given, one, other)
            y = attend(*given, one)
            assert not y[:, :, 2].any()
            assert all(torch.isfinite(t).all() for t in beside.gradients(y, given))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_of_numbers_and_their_gradient(shape, dtype):
    torch.manual_seed(4)
    mask = torch.randn(shape, dtype=dtype)
    agree(operands(dtype), mask, mask.double())
    own, wide = mask.clone().requires_grad_(), mask.double().requires_grad_()
    agree(operands(dtype), own, wide, own, wide)


def test_masks_that_lie_otherwise():
    torch.manual_seed(5)
    for mask in (
        torch.randn(9, 6).T,
        torch.randn(6, 18)[:, ::2],
        torch.randn(1, 9).expand(6, 9),
        torch.randn(55)[1:].view(6, 9),
    ):
        agree(operands(), mask.bfloat16(), mask.bfloat16().double())
        agree(operands(), mask > 0, mask > 0)


def test_heads_are_shared_with_the_flag_and_without():
    for heads in ((4, 1), (4, 2), (4, 4)):
        given = operands(heads=heads)
        assert torch.equal(attend(*given, enable_gqa=True), attend(*given))


@pytest.mark.parametrize("causal", [False, True])
def test_dropout_and_its_gradient(causal):
    """Beside the same weights in f64, dropped where the library says it dropped them."""
    given, p = operands(torch.float16, heads=(4, 4)), 0.375
    seed, bound = torch.tensor([5]), {"right_bound": 0} if causal else {}
    plain = [t.detach() for t in given]
    _, kept = dp.sdpa_fwd(*plain, dropout=p, seed=seed, offset=torch.zeros_like(seed), mask=True, **bound)
    assert 0.4 < kept.double().mean() < 0.85
    y = attention.ATTENTION(*given, None, seed, p, causal, None)[0]
    wide = beside.mapped_to_f64(given)
    scores = wide[0] @ wide[1].mT / 4
    if causal:
        scores = scores.masked_fill(~torch.ones(6, 9, dtype=torch.bool).tril(), -torch.inf)
    expected = (scores.softmax(-1) * kept.double() / (1 - p)) @ wide[2]
    ours, others = beside.gradients(y, given), beside.gradients(expected, wide)
    beside.close([y, *ours], [expected, *others], 48 * torch.finfo(y.dtype).eps)


def test_dropout_is_drawn_by_the_generator_of_torch():
    given = operands()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(attend(*given, dropout_p=0.5))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not torch.equal(found[2], attend(*given, dropout_p=0.5))
    state = torch.get_rng_state()
    attend(*given)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 11):
        given = operands(queries=tokens, keys=tokens)
        torch.manual_seed(6)
        bools, numbers = torch.rand(tokens, tokens) < 0.5, torch.randn(2, 1, tokens, tokens).bfloat16()
        for mask in (bools, numbers):
            y, expected = compiled(*given, mask), attend(*given, mask)
            beside.close([y, *beside.gradients(y, given)], [expected, *beside.gradients(expected, given)], 0)
    y = compiled(*given, dropout_p=0.25)
    assert y.isfinite().all()
    assert all(t.isfinite().all() for t in beside.gradients(y, given))


def test_autocast():
    given = [t.detach().float().requires_grad_() for t in operands()]
    mask = torch.randn(6, 9)
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(*given, mask)
    assert y.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in beside.gradients(y, given))


def test_what_does_not_fit_is_refused_by_name():
    q, k, v = (t.detach() for t in operands())
    mask = torch.ones(6, 9, dtype=torch.bool)
    for call, text in (
        (lambda: attend(q, k, v, mask.float()), "attn_mask: got a tensor of torch.float32 on cpu"),
        (
            lambda: attend(q, k, v, mask[:5]),
            r"attn_mask: got shape \(5, 9\); expected a shape that broadcasts to \(2, 4, 6, 9\)",
        ),
        (lambda: attend(q, k, v, mask[None, None, None]), "attn_mask: got shape"),
        (lambda: attend(q, k, v, mask, is_causal=True), "attn_mask: got a mask with is_causal"),
        (lambda: attend(q, k, v, [1]), "attn_mask: got a list"),
        (lambda: attend(q, k, v, dropout_p=1.0), "dropout_p: got 1.0; expected a probability p with 0 <= p < 1"),
        (lambda: attend(q, k, v, None, -0.5), "dropout_p: got -0.5"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
