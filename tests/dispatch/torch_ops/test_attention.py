"""`dispatch.torch.scaled_dot_product_attention` beside torch's own in f64, and what torch does with it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest, NoRow

torch = pytest.importorskip("torch")
attention = pytest.importorskip("dispatch.torch.attention")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

DTYPES = (torch.float16, torch.bfloat16)


def attend(query, key, value, is_causal=False, scale=None):
    return attention.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


def operands(dtype=torch.float16, queries=6, keys=9, heads=(4, 2), head=(16, 16), batch=2):
    torch.manual_seed(0)
    shapes = ((heads[0], queries, head[0]), (heads[1], keys, head[0]), (heads[1], keys, head[1]))
    return [torch.randn(batch, *shape, dtype=dtype).requires_grad_() for shape in shapes]


def theirs(query, key, value, is_causal=False, scale=None):
    function = torch.nn.functional.scaled_dot_product_attention
    return function(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=True)


def agree(given, *choices):
    wide = beside.mapped_to_f64(given)
    y, expected = attend(*given, *choices), theirs(*wide, *choices)
    assert y.dtype == given[0].dtype
    found = beside.gradients(y, given)
    beside.close([y, *found], [expected, *beside.gradients(expected, wide)], 32 * torch.finfo(y.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_values_and_gradients_against_f64(dtype, causal):
    for scale in (None, 0.5):
        agree(operands(dtype), causal, scale)
        agree(operands(dtype, heads=(3, 3), head=(24, 8)), causal, scale)
        agree(operands(dtype, queries=1, keys=5, heads=(4, 1)), causal, scale)
        agree(operands(dtype, queries=33, keys=33, batch=1), causal, scale)
        agree(operands(dtype, queries=9, keys=4), causal, scale)


def test_operands_that_lie_otherwise():
    given = operands(queries=9, heads=(4, 4))
    tokens_first = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in given]
    agree(tokens_first)
    assert attend(*tokens_first).stride() == tokens_first[0].stride()
    agree([t.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for t in given])
    agree([t.detach()[:, :1].expand(-1, 4, -1, -1).requires_grad_() for t in given])
    whole = torch.randn(2, 9, 3 * 4 * 16 + 4, dtype=torch.float16)[..., 4:]
    agree([t.view(2, 9, 4, 16).transpose(1, 2).requires_grad_() for t in whole.split(64, -1)])


@pytest.mark.parametrize("dtype", beside.first_of(DTYPES), ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(dtype, causal):
    given = operands(dtype)
    bias = torch.randn(1, 4, 6, 9, dtype=dtype, requires_grad=True)
    for more in ((None, None, 0.0), (bias, None, 0.0), (None, torch.tensor([7]), 0.5)):
        scale = 0.25 if causal else None
        torch.library.opcheck(attention.ATTENTION.overload, (*given, *more, causal, scale))
        with torch.no_grad():
            results = attention.ATTENTION(*given, *more, causal, scale)
        detached = [t if t is None else t.detach() for t in (*given, *more[:2])]
        do = torch.randn_like(results[0])
        for of_bias in {False, more[0] is not None}:
            choices = (more[2], causal, scale, of_bias)
            torch.library.opcheck(attention.ATTENTION_BACKWARD.overload, (do, *detached, *results, *choices))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for tokens in (6, 11):
        given = operands(queries=tokens, keys=tokens)
        y, expected = compiled(*given, True), attend(*given, True)
        beside.close([y, *beside.gradients(y, given)], [expected, *beside.gradients(expected, given)], 0)


def test_autocast():
    given = [t.detach().float().requires_grad_() for t in operands()]
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(*given)
    assert y.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in beside.gradients(y, given))


def test_what_does_not_fit_is_refused_by_name():
    q, k, v = (t.detach() for t in operands())
    for call, text in (
        (lambda: attend(q.float(), k.float(), v.float()), "query: got a tensor of torch.float32"),
        (lambda: attend(q[0], k, v), "query: got shape"),
        (lambda: attend(q, k[:1], v), "key: got shape"),
        (lambda: attend(q, k[..., :8], v), "key: got heads of 8; expected 16"),
        (lambda: attend(q, k, v[:, :, :3]), "value: got shape"),
        (lambda: attend(q[:, :3], k, v), "key: got 2 heads; expected a divisor of the 3"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
    with pytest.raises(NoRow, match="multiple of 8"):
        attend(q[..., :4].contiguous(), k[..., :4].contiguous(), v)


def test_a_row_of_the_lowest_numbers_has_equal_weights_as_in_torch():
    """As some models write masks: finite, so that nothing is hidden from a query that sees nothing else."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4, 8).bfloat16() for _ in range(3))
    mask = torch.zeros(1, 1, 4, 4).bfloat16()
    mask[..., 1, :] = torch.finfo(torch.bfloat16).min
    mask[..., 2, 1:] = torch.finfo(torch.bfloat16).min
    mask[..., 3, :] = -torch.inf
    y = attention.scaled_dot_product_attention(q, k, v, mask)
    right = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double())
    right[..., 1, :] = v.double().mean(2)
    right[..., 3, :] = 0
    torch.testing.assert_close(y.double(), right, rtol=2e-2, atol=2e-2)
