"""`dispatch.torch.conv2d` beside torch's own, and what torch does with it."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
F = torch.nn.functional
convolution = pytest.importorskip("dispatch.torch.convolution")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)

F64 = torch.float64
conv2d = convolution.conv2d
FUSED = ((None, False), ("relu", False), ("relu", True))
STEPS = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}


def theirs(x, weight, bias=None, residual=None, activation=None, **choices):
    y = F.conv2d(x, weight, bias, **choices)
    y = y if residual is None else y + residual
    return y if activation is None else F.relu(y)


def operands(dtype=F64, groups=1, bias=True, residual=False, last=False, **choices):
    """Small whole numbers, of which every sum is exact in every dtype here."""
    torch.manual_seed(0)
    x, weight = torch.randint(-1, 2, (2, 8, 7, 6)).to(dtype), torch.randint(-2, 3, (4, 8 // groups, 3, 2)).to(dtype)
    x = x.to(memory_format=torch.channels_last) if last else x
    given = {"x": x, "weight": weight}
    if bias:
        given["bias"] = torch.randint(-2, 3, (4,)).to(dtype)
    if residual:
        given["residual"] = torch.randint(
            -3, 4, F.conv2d(x.float(), weight.float(), groups=groups, **choices).shape
        ).to(dtype)
    return {name: t.requires_grad_() for name, t in given.items()}


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("activation", "residual"), FUSED)
@pytest.mark.parametrize("last", [False, True])
def test_values_and_gradients_are_those_of_torch(dtype, activation, residual, last):
    for groups, bias, steps in itertools.product((1, 2), (True, False), ({}, STEPS)):
        given = operands(dtype, groups, bias, residual, last, **steps)
        wide = dict(zip(given, beside.mapped_to_f64(given.values()), strict=True))
        y = conv2d(**given, activation=activation, groups=groups, **steps)
        expected = theirs(**wide, activation=activation, groups=groups, **steps)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        beside.close([y], [expected], 0)
        found, exact = beside.gradients(y, list(given.values())), beside.gradients(expected, list(wide.values()))
        # The cotangent is rounded to dtype, and so is each gradient, of some 80 terms.
        beside.close(found, exact, 64 * torch.finfo(dtype).eps)


def test_operands_that_lie_otherwise():
    given = operands()
    for x in (torch.randn(2, 8, 6, 7, dtype=F64).mT, torch.randn(2, 16, 7, 6, dtype=F64)[:, ::2]):
        others = [x.detach().requires_grad_(), torch.randn(4, 8, 2, 3, dtype=F64).mT.requires_grad_(), given["bias"]]
        y, expected = conv2d(*others), theirs(*others)
        beside.close([y, *beside.gradients(y, others)], [expected, *beside.gradients(expected, others)], 1e-12)


@pytest.mark.parametrize(("activation", "residual"), FUSED)
def test_gradcheck(activation, residual):
    given = operands(residual=residual, bias=True)
    torch.manual_seed(1)
    shifted = [
        (t.detach()[:1] + torch.rand_like(t[:1])) if n in ("x", "residual") else t.detach() for n, t in given.items()
    ]
    names = list(given)

    def call(*tensors):
        return conv2d(**dict(zip(names, tensors, strict=True)), activation=activation)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in shifted])


@pytest.mark.parametrize("last", beside.first_of([False, True]))
def test_opcheck(last):
    for bias, (activation, residual) in itertools.product((True, False), FUSED):
        given = operands(bias=bias, residual=residual, last=last, **STEPS)
        tensors = [given.get(name) for name in ("x", "weight", "bias", "residual")]
        torch.library.opcheck(convolution.CONV.overload, (*tensors, [2, 1, 1, 2, 1, 2], 1, activation == "relu"))
    x, weight = (t.detach() for t in tensors[:2])
    dz = torch.randn(F.conv2d(x, weight).shape, dtype=F64)
    for needs in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(convolution.CONV_BACKWARD.overload, (dz, x, weight, [1, 1, 0, 0, 1, 1], 1, *needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()
    compiled = torch.compile(conv2d, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 5):
        given = operands()
        x = torch.randn(batch, 8, 7, 6, dtype=F64, requires_grad=True)
        others = [x, given["weight"], given["bias"]]
        y, expected = (call(*others, padding=1, activation="relu") for call in (compiled, conv2d))
        beside.close([y, *beside.gradients(y, others)], [expected, *beside.gradients(expected, others)], 1e-12)


def test_autocast():
    given = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = conv2d(**given), theirs(**given)
    assert y.dtype == expected.dtype == torch.bfloat16
    beside.close([y], [expected], 0)


def test_what_does_not_fit_is_refused_by_name():
    x, weight = torch.ones(1, 4, 5, 5), torch.ones(2, 4, 3, 3)
    for call, text in (
        (lambda: conv2d(x.to(torch.int8), weight), "x: got a tensor of torch.int8"),
        (lambda: conv2d(x[0], weight), r"x: got shape .*x\.unsqueeze\(0\) adds a batch"),
        (lambda: conv2d(x[:0], weight), "x: got shape .*skip the call for an empty batch"),
        (lambda: conv2d(x, weight[0]), r"weight: got shape \(4, 3, 3\); expected four axes with extents of 1 or more$"),
        (lambda: conv2d(x, weight, groups=2), "groups: got 2 with x"),
        (lambda: conv2d(x, weight, torch.ones(3)), "bias: got shape"),
        (lambda: conv2d(x, weight, stride=0), "stride: got 0"),
        (lambda: conv2d(x, weight, padding="same"), "padding: got 'same'"),
        (lambda: conv2d(x, weight, activation="gelu"), "activation: got 'gelu'"),
        (lambda: conv2d(x, weight, residual=torch.ones(1, 2, 3, 3)), "residual: got a residual without an activation"),
        (
            lambda: conv2d(x, weight, activation="relu", residual=torch.ones(1, 2, 3, 1)),
            r"residual: got shape \(1, 2, 3, 1\); expected \(1, 2, 3, 3\)",
        ),
        (lambda: conv2d(x, weight, dilation=3), r"weight: got filters \(3, 3\) with dilation \(3, 3\); .*\(5, 5\)"),
        (lambda: conv2d(x, weight, dilation=2**30, padding=1), r"weight: got filters .* fit into .*\(7, 7\)"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
