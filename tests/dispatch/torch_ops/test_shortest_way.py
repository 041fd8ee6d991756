"""How `dispatch.torch` calls its ops: by torch's dispatcher where anything listens there, and directly where not."""

from __future__ import annotations

import pytest

from dispatch.errors import BadRequest

torch = pytest.importorskip("torch")
linear = pytest.importorskip("dispatch.torch").linear
products = pytest.importorskip("dispatch.torch.products")
shared = pytest.importorskip("dispatch.torch.shared")

from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

F64 = torch.float64
WARNS = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's first tangent of a process


def operands(grad=False):
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=F64).requires_grad_(grad) for shape in ((5, 7), (4, 7), (4,))]


class Counting(TorchDispatchMode):
    """Which ops are called."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch):
    """The names of the ops that are called through torch's dispatcher."""
    names = []
    for op in (products.LINEAR, products.LINEAR_BACKWARD):
        overload = op.overload
        monkeypatch.setattr(op, "overload", lambda *a, o=overload: (names.append(o.name()), o(*a))[1])
    return names


def test_eager_calls_pass_the_dispatcher_by(dispatched):
    x, weight, bias = operands()
    plain = linear(x, weight, bias, "gelu")
    for t in (weight, bias):
        t.requires_grad_()
    y = linear(x, torch.nn.Parameter(weight), bias, "gelu")
    y.sum().backward()
    assert torch.equal(plain, y)
    with torch.no_grad():
        assert not linear(x, weight, bias).requires_grad
    with torch.inference_mode():
        assert linear(x, weight, bias).is_inference()
    assert dispatched == []


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_both_ways_give_the_same_bits(activation, monkeypatch):
    found = []
    for alone in (True, False):
        if not alone:
            monkeypatch.setattr(shared, "_runs_directly", lambda _: False)
        given = operands(grad=True)
        y = linear(*given, activation)
        found.append([y, *torch.autograd.grad(y.square().sum(), given)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_modes_see_the_op():
    with Counting() as mode:
        linear(*operands())
    assert "dispatch.linear.default" in mode.called
    traced = make_fx(lambda *t: linear(*t, "relu"))(*operands())
    assert "dispatch.linear.default" in {str(node.target) for node in traced.graph.nodes}
    with torch.profiler.profile() as profile:
        linear(*operands())
    assert "dispatch::linear" in {event.name for event in profile.events()}


def test_functions_of_torch_see_it_in_a_mode():
    class Named(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen = []
    with Named():
        linear(*operands())
    assert any("dispatch.linear" in name for name in seen)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit is
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # about the checks of shapes
def test_a_trace_has_the_op():
    given = operands()
    traced = torch.jit.trace(lambda x: linear(x, *given[1:]), (given[0],), check_trace=False)
    other = torch.randn(5, 7, dtype=F64)
    assert torch.equal(traced(other), linear(other, *given[1:]))


def test_negative_views_and_meta_tensors_go_through_the_dispatcher(dispatched):
    x, weight, bias = operands()
    expected = linear(x, weight, bias)
    assert dispatched == []
    negative = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negative.is_neg()
    assert torch.equal(linear(negative, weight, bias), expected)
    assert len(dispatched) == 1
    assert linear(x.to("meta"), weight.to("meta")).is_meta
    assert len(dispatched) == 2


def test_forward_gradients_go_through_the_dispatcher(dispatched):
    x, weight, bias = operands()
    with forward_ad.dual_level():
        linear(x, weight, bias)
    assert dispatched == ["dispatch::linear"]


@WARNS
@pytest.mark.parametrize("followed", range(3))
def test_tangents_that_torch_would_lose_without_a_word_are_refused(followed):
    given = operands()
    one = torch.ones_like(given[followed])

    def call(x):
        return linear(*given[:followed], x, *given[followed + 1 :])

    with pytest.raises(BadRequest, match=r"dispatch::linear: got an operand with a tangent of forward-mode AD"):
        torch.func.jvp(call, (given[followed],), (one,))
    with forward_ad.dual_level():
        with pytest.raises(BadRequest, match="forward-mode AD"):
            call(forward_ad.make_dual(given[followed], one))
        torch.testing.assert_close(call(given[followed]), torch.nn.functional.linear(*given))


@WARNS
def test_what_no_tangent_follows_is_a_constant():
    given = operands()
    x = torch.ones(3, dtype=F64)
    _, tangent = torch.func.jvp(lambda x: x.square() * linear(*given).sum(), (x,), (x,))
    torch.testing.assert_close(tangent, 2 * x * torch.nn.functional.linear(*given).sum())


def test_the_backward_of_a_mode_is_dispatched(dispatched):
    y = linear(*operands(grad=True))
    with Counting() as mode:
        y.sum().backward()
    assert "dispatch.linear_backward.default" in mode.called
    assert dispatched == ["dispatch::linear_backward"]


def test_checkpoints_and_hooks_for_saved_tensors():
    given = operands(grad=True)
    expected = torch.autograd.grad(linear(*given, "gelu").sum(), given)
    again = torch.utils.checkpoint.checkpoint(lambda *t: linear(*t, "gelu"), *given, use_reentrant=False)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        y = linear(*given, "gelu")
    assert packed
    for one in (again, y):
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(one.sum(), given), expected, strict=True))
