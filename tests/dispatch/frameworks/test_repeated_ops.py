"""Eager calls of dispatch.torch that were made before make no request and no views, and come to the same plan.

The device is that of test_repeated_calls.py: host memory under the name of a GPU, and an executor that notes.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import dispatch as dp

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import dispatch.torch as ops  # noqa: E402  # it imports torch
from dispatch.torch import attention, norms, products, shared  # noqa: E402

spec = importlib.util.spec_from_file_location("repeated_calls", Path(__file__).with_name("test_repeated_calls.py"))
calls = importlib.util.module_from_spec(spec)
spec.loader.exec_module(calls)
dev, randn = calls.dev, calls.randn


@pytest.fixture(autouse=True)
def there(dev, monkeypatch):
    """Tensors on the CPU count as on that GPU, and nothing is remembered of other tests."""
    for module in (products, norms, attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
        before = module.CALLS
        optional = set(before.operands) - before._needed
        monkeypatch.setattr(module, "CALLS", type(before)(before.operands, before.choices, tuple(optional)))
    return dev


def half(*shape):
    return calls.aligned(lambda: torch.randn(*shape).half())


OPS = {
    "linear": (ops.linear, lambda: (randn(5, 8), randn(4, 8)), (5, 4)),
    "linear of three axes": (ops.linear, lambda: (randn(2, 3, 8), randn(4, 8)), (2, 3, 4)),
    "linear of one axis": (ops.linear, lambda: (randn(8), randn(4, 8)), (4,)),
    "linear with bias and GELU": (
        lambda x, w, b: ops.linear(x, w, b, "gelu"),
        lambda: (randn(2, 3, 8), randn(4, 8), randn(4)),
        (2, 3, 4),
    ),
    "linear with weights by columns": (
        ops.linear,
        lambda: (randn(2, 3, 8), randn(8, 4).t()),
        (2, 3, 4),
    ),
    "layer norm": (
        lambda x, w, b: ops.layer_norm(x, (8,), w, b),
        lambda: (randn(2, 3, 8), randn(8), randn(8)),
        (2, 3, 8),
    ),
    "layer norm over two axes": (
        lambda x, w, b: ops.layer_norm(x, (3, 8), w, b),
        lambda: (randn(2, 3, 8), randn(3, 8), randn(3, 8)),
        (2, 3, 8),
    ),
    "RMS norm": (lambda x, w: ops.rms_norm(x, (8,), w), lambda: (randn(2, 3, 8), randn(8)), (2, 3, 8)),
    "attention": (
        lambda q, k, v: ops.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (half(1, 2, 8, 8), half(1, 2, 8, 8), half(1, 2, 8, 8)),
        (1, 2, 8, 8),
    ),
    "attention with heads behind tokens": (
        ops.scaled_dot_product_attention,
        lambda: tuple(half(1, 8, 2, 8).transpose(1, 2) for _ in range(3)),
        (1, 2, 8, 8),
    ),
}
CASES = pytest.mark.parametrize(("call", "operands", "shape"), OPS.values(), ids=OPS.keys())


@CASES
def test_a_repeated_call_makes_no_request_and_comes_to_the_same(dev, made, call, operands, shape):
    executor = dev.executor()
    with torch.no_grad():
        for turn in range(4):
            given = operands()
            executor.runs.clear()
            y = call(*given)
            ((plan, words),) = executor.runs
            assert tuple(y.shape) == shape
            names = {x.data_ptr(): n for n, x in enumerate(given)} | {y.data_ptr(): "y"}
            noted = plan, y.dtype, y.stride(), [names.get(word, word) for word in words]
            if turn == 0:
                first, count = noted, sum(made.values())
            assert noted == first
    assert sum(made.values()) == count == 1


@CASES
def test_weights_that_are_parameters_are_fine_where_nothing_follows(made, call, operands, shape):
    with torch.no_grad():
        for _ in range(3):
            given = [torch.nn.Parameter(x) if n else x for n, x in enumerate(operands())]
            assert tuple(call(*given).shape) == shape
    assert sum(made.values()) == 1


@CASES
def test_what_else_torch_does_is_done(made, call, operands, shape):
    """Each of these goes by torch: a gradient is followed, autocast changes dtypes, a mode sees the op."""
    with torch.no_grad():
        call(*operands())
        call(*operands())
    given = [x.requires_grad_() for x in operands()]
    y = call(*given)
    assert y.requires_grad
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Mode():
        assert tuple(call(*operands()).shape) == shape
    assert any("dispatch" in name for name in seen)
    with torch.no_grad():
        before = sum(made.values())
        assert tuple(call(*operands()).shape) == shape
    assert sum(made.values()) == before


def test_other_shapes_strides_and_choices_are_other_calls(made):
    with torch.no_grad():
        for _ in range(3):
            for rows in (3, 4):
                for activation in (None, "relu", "gelu"):
                    y = ops.linear(randn(rows, 8), randn(4, 8), randn(4), activation)
                    assert tuple(y.shape) == (rows, 4)
                    y = ops.linear(randn(rows, 2, 8).transpose(0, 1), randn(4, 8))
                    assert tuple(y.shape) == (2, rows, 4)
    assert made["matmul"] <= 2 * 3 + 2 * 9


def test_a_shape_may_be_of_torch_or_a_list(made):
    with torch.no_grad():
        for _ in range(3):
            x, w = randn(3, 8), randn(8)
            for shape in ((8,), [8], x.shape[-1:]):
                assert ops.rms_norm(x, shape, w).shape == x.shape
    assert made["norm_fwd"] == 1


def test_what_is_copied_for_a_call_is_copied_each_time(dev):
    """x has no rows that a product could read where they are."""
    executor = dev.executor()
    with torch.no_grad():
        for _ in range(4):
            x, w = randn(3, 8, 2).transpose(1, 2)[:, :, ::2], randn(5, 4)
            executor.runs.clear()
            y = ops.linear(x, w)
            assert tuple(y.shape) == (3, 2, 5)
            ((_, words),) = executor.runs
            assert x.data_ptr() not in words


def test_mistakes_are_told_by_the_op_s_own_names_after_good_calls():
    with torch.no_grad():
        for _ in range(2):
            ops.linear(randn(3, 8), randn(4, 8))
            ops.rms_norm(randn(3, 8), (8,), randn(8))
        with pytest.raises(dp.errors.BadRequest, match="weight"):
            ops.linear(randn(3, 8), randn(4, 7))
        with pytest.raises(dp.errors.BadRequest, match="weight"):
            ops.rms_norm(randn(3, 8), (7,), randn(8))


def test_autocast_changes_dtypes_after_good_calls(monkeypatch):
    monkeypatch.setattr(shared, "is_plain_inference", lambda: not torch.is_autocast_enabled("cpu"))
    for module in (products, norms, attention):
        monkeypatch.setattr(module, "is_plain_inference", shared.is_plain_inference)
    with torch.no_grad():
        for _ in range(2):
            assert ops.linear(randn(3, 8), randn(4, 8)).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert ops.linear(randn(3, 8), randn(4, 8)).dtype is torch.bfloat16
