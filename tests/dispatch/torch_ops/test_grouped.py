"""`dispatch.torch.grouped_linear` beside torch's linear layer for each group, in f64."""

from __future__ import annotations

import importlib.util
from itertools import accumulate, pairwise
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
grouped = pytest.importorskip("dispatch.torch.grouped")
grouped_linear = grouped.grouped_linear
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

DTYPES = (torch.float16, torch.bfloat16)
SIZES = ((3, 0, 5, 2), (0, 0, 0), (7,), (1, 1, 1), (0, 9, 0))


def operands(sizes=(3, 0, 5, 2), width=16, out=24, behind=0, dtype=torch.bfloat16):
    torch.manual_seed(0)
    x = torch.randn(sum(sizes) + behind, width, dtype=dtype)
    return [x.requires_grad_(), torch.randn(len(sizes), out, width, dtype=dtype).requires_grad_()], [*accumulate(sizes)]


def theirs(x, weight, ends):
    parts = [x[a:b] @ weight[g].T for g, (a, b) in enumerate(pairwise((0, *ends)))]
    return torch.cat([*parts, x.new_zeros(x.shape[0] - ends[-1], weight.shape[1])])


def agree(given, ends):
    wide = beside.mapped_to_f64(given)
    expected = theirs(*wide, ends)
    exact = [expected.detach(), *beside.gradients(expected, wide)]
    bound = 16 * torch.finfo(given[0].dtype).eps
    for how in (ends, tuple(ends), torch.tensor(ends), torch.tensor(ends, dtype=torch.int32)):
        y = grouped_linear(*given, how)
        assert y.dtype == given[0].dtype
        assert y.is_contiguous()
        beside.close([y, *beside.gradients(y, given)], exact, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_against_f64(sizes, dtype):
    for width, out in ((16, 24), (7, 5), (1, 1), (8, 1), (1, 8), (40, 33)):
        for behind in (0, 4):
            agree(*operands(sizes, width, out, behind, dtype))


def test_nothing_to_do():
    for width, out in ((0, 4), (4, 0), (0, 0)):
        given, ends = operands(width=width, out=out)
        y = grouped_linear(*given, ends)
        assert y.shape == (10, out)
        assert not any(t.any() for t in (y, *beside.gradients(y, given)))
    assert grouped_linear(torch.ones(3, 8).half(), torch.ones(0, 8, 8).half(), []).tolist() == [[0.0] * 8] * 3


def test_operands_that_lie_otherwise():
    (x, weight), ends = operands()
    x, weight = x.detach(), weight.detach()
    for a in (x.T.contiguous().T, torch.cat((x, x), 1)[:, 3:19], torch.cat((x, x), 1)[:, ::2], x[:1].expand(10, 16)):
        for b in (weight.mT.contiguous().mT, torch.cat((weight, weight), 2)[..., 1:17], weight[:1].expand(4, 24, 16)):
            agree([t.detach().requires_grad_() for t in (a, b)], ends)


def test_a_gradient_that_is_not_dense():
    given, ends = operands()
    for dy in (torch.ones(1, 1).bfloat16().expand(10, 24), torch.randn(24, 10).bfloat16().T):
        ours = torch.autograd.grad(grouped_linear(*given, ends), given, dy)
        beside.close(ours, torch.autograd.grad(theirs(*given, ends), given, dy), 0.1)


@pytest.mark.parametrize("needed", [0, 1])
def test_only_the_gradients_that_are_asked_for(needed):
    given, ends = operands()
    given[1 - needed].requires_grad_(False)
    ours = beside.gradients(grouped_linear(*given, torch.tensor(ends)), given[needed : needed + 1])
    beside.close(ours, beside.gradients(theirs(*given, ends), given[needed : needed + 1]), 0.1)


@pytest.mark.parametrize("dtype", beside.first_of(DTYPES), ids=str)
def test_opcheck(dtype):
    given, ends = operands(behind=2, dtype=dtype)
    tensor = torch.tensor(ends, dtype=torch.int32)
    for known in ([], ends):
        torch.library.opcheck(grouped.GROUPED.overload, (*given, tensor, known))
        detached = [t.detach() for t in given]
        dy = torch.randn(12, 24, dtype=dtype)
        for needs in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(grouped.GROUPED_BACKWARD.overload, (dy, *detached, tensor, known, *needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for sizes in ((3, 0, 5, 2), (1, 8, 2, 4)):
        given, ends = operands(sizes)
        y, expected = compiled(*given, torch.tensor(ends)), grouped_linear(*given, ends)
        ours, others = beside.gradients(y, given), beside.gradients(expected, given)
        beside.close([y, *ours], [expected, *others], 0)


def test_export():
    class Experts(torch.nn.Module):
        def forward(self, x, weight, ends):
            return grouped_linear(x, weight, ends)

    given, ends = operands()
    exported = torch.export.export(Experts(), (*(t.detach() for t in given), torch.tensor(ends)))
    assert "dispatch.grouped_linear" in str(exported.graph)


def test_autocast():
    given, ends = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(*given, ends)
    assert y.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in beside.gradients(y, given))


def test_grouped_products_take_both_forms():
    x, weights, ends = torch.ones(10, 16).half(), torch.ones(2, 16, 8).half(), torch.tensor([4, 10], dtype=torch.int32)
    d = dp.grouped_matmul(x, weights, ends)
    assert type(d) is torch.Tensor
    assert (d == 16).all()
    for one in dp.grouped_matmul([x[:8], x[8:]], list(weights)):
        assert type(one) is torch.Tensor
        assert (one == 16).all()


def test_ends_are_on_the_operands_device_whatever_torchs_default_is():
    given, ends = operands()
    expected = grouped_linear(*given, ends)
    torch.set_default_device("meta")
    try:
        assert torch.equal(grouped_linear(*given, ends), expected)
    finally:
        torch.set_default_device(None)


def test_what_is_not_there_is_refused():
    given, ends = operands()
    (dx,) = torch.autograd.grad(grouped_linear(*given, ends).sum(), given[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dx.sum().backward()
    x, weight = (t.detach() for t in given)
    with pytest.raises(BadRequest, match="vmap over dispatch::grouped_linear"):
        torch.vmap(lambda t: grouped_linear(t, weight, ends))(torch.stack((x, x)))


def test_what_does_not_fit_is_refused_by_name():
    (x, weight), ends = operands()
    for call, text in (
        (lambda: grouped_linear(x.float(), weight.float(), ends), "x: got a tensor of torch.float32"),
        (lambda: grouped_linear(x[None], weight, ends), "x: got shape"),
        (lambda: grouped_linear(x, weight.mT, ends), r"weight: got shape \(4, 16, 24\); expected \(groups, out, 16\)"),
        (lambda: grouped_linear(x, weight, ends[1:]), "ends: got .*expected 4 integers"),
        (lambda: grouped_linear(x, weight, [3, 2, 8, 10]), "ends: got .*non-decreasing numbers, at most 10"),
        (lambda: grouped_linear(x, weight, [3, 3, 8, 11]), "ends: got .*non-decreasing numbers, at most 10"),
        (
            lambda: grouped_linear(x, weight, torch.tensor([3, 3, 8, 11])),
            "ends: got .*non-decreasing numbers, at most 10",
        ),
        (lambda: grouped_linear(x, weight, torch.tensor([3.0, 3.0, 8.0, 10.0])), "ends: got torch.float32 of shape"),
        (
            lambda: grouped_linear(x, weight, torch.tensor(ends)[:3]),
            r"ends: got torch.int64 .*int32 or torch.int64 of shape \(4,\)",
        ),
        (lambda: grouped_linear(x, weight, [3, 3, 8, 1e9]), "ends: got .*expected 4 integers"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
