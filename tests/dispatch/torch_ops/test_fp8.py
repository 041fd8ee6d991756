"""`dispatch.torch.fp8_linear` beside the same products of the same fp8 operands in f64."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
fp8 = pytest.importorskip("dispatch.torch.fp8")
spec = importlib.util.spec_from_file_location("beside", Path(__file__).with_name("beside.py"))
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)


def operands(*shape, out=32, dtype=torch.bfloat16):
    torch.manual_seed(0)
    given = [torch.randn(shape, dtype=dtype), torch.randn(out, shape[-1], dtype=dtype), torch.randn(out, dtype=dtype)]
    scales = {"scale_x": torch.tensor(0.01), "scale_weight": torch.tensor([0.5]), "scale_grad": torch.tensor(0.25)}
    return [t.requires_grad_() for t in given], scales


def through(x, scale, dtype):
    """What is left of x in f64 when it was fp8."""
    most = torch.finfo(dtype).max
    return ((x.detach().float() / scale).clamp(-most, most).to(dtype).double() * scale.double()).reshape(
        -1, x.shape[-1]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(16, 48), (5, 48), (2, 3, 32), (32,), (0, 16)], ids=str)
def test_values_and_gradients(shape, dtype):
    (x, weight, bias), scales = operands(*shape, dtype=dtype)
    a = through(x, scales["scale_x"], fp8.FORWARD)
    b = through(weight, scales["scale_weight"], fp8.FORWARD)
    y = fp8.fp8_linear(x, weight, bias, **scales)
    assert y.dtype == dtype
    torch.manual_seed(1)
    dy = torch.randn(y.shape, dtype=torch.float32).to(dtype)
    rounded = through(dy, scales["scale_grad"], fp8.BACKWARD)
    found = beside.gradients(y, [x, weight, bias])
    expected = [a @ b.T + bias.double(), rounded @ b, rounded.T @ a, dy.double().reshape(-1, 32).sum(0)]
    shapes = [t.shape for t in (y, x, weight, bias)]
    exact = [t.view(shape) for t, shape in zip(expected, shapes, strict=True)]
    beside.close([y, *found], exact, 8 * torch.finfo(dtype).eps)


def test_without_bias_and_in_no_need_of_gradients():
    (x, weight, _), scales = operands(5, 48)
    y = fp8.fp8_linear(x.detach(), weight, **scales)
    (dweight,) = beside.gradients(y, [weight])
    assert dweight.shape == weight.shape
    one = torch.ones(())
    assert not fp8.fp8_linear(x.detach(), weight.detach(), scale_x=one, scale_weight=one).requires_grad


def test_opcheck_and_compile():
    torch.compiler.reset()
    given, scales = operands(5, 48)
    for bias in (given[2], None):
        torch.library.opcheck(fp8.FP8_LINEAR.overload, (*given[:2], bias, *scales.values()))
    detached = [t.detach() for t in given]
    for needs in ((True, True), (True, False), (False, True)):
        dy = torch.randn(5, 32, dtype=torch.bfloat16)
        torch.library.opcheck(fp8.FP8_BACKWARD.overload, (dy, *detached[:2], *scales.values(), *needs))
    compiled = torch.compile(fp8.fp8_linear, backend="aot_eager", fullgraph=True)
    y, expected = compiled(*given, **scales), fp8.fp8_linear(*given, **scales)
    beside.close([y, *beside.gradients(y, given)], [expected, *beside.gradients(expected, given)], 0)


def test_what_does_not_fit_is_refused_by_name():
    (x, weight, bias), scales = operands(5, 48)
    for call, text in (
        (lambda: fp8.fp8_linear(x.float(), weight.float(), **scales), "x: got a tensor of torch.float32"),
        (lambda: fp8.fp8_linear(x[:, :40], weight[:, :40], **scales), "x: got shape"),
        (lambda: fp8.fp8_linear(x, weight[:30], **scales), "weight: got shape"),
        (lambda: fp8.fp8_linear(x, weight, bias[:16], **scales), "bias: got shape"),
        (lambda: fp8.fp8_linear(x, weight, **{**scales, "scale_x": torch.ones(2)}), "scale_x: got shape"),
        (lambda: fp8.fp8_linear(x, weight, **{**scales, "scale_x": torch.ones(1).half()}), "scale_x: got a tensor"),
    ):
        with pytest.raises(BadRequest, match=text):
            call()
