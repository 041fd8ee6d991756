"""What is written in place under autograd: outputs of ours by torch's users, and torch's tensors by calls of ours."""

import pytest

import dispatch as dp

torch = pytest.importorskip("torch")
dt = pytest.importorskip("dispatch.torch")

F = torch.nn.functional


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


OPS = {
    "linear": (lambda x, w, _: dt.linear(x, w), lambda x, w, _: F.linear(x, w)),
    "linear with gelu": (
        lambda x, w, _: dt.linear(x, w, None, "gelu"),
        lambda x, w, _: F.gelu(F.linear(x, w), approximate="tanh"),
    ),
    "mlp": (
        lambda x, w, v: dt.mlp(x, w, None, v, None, "relu"),
        lambda x, w, v: F.linear(F.relu(F.linear(x, w)), v),
    ),
    "layer_norm": (lambda x, *_: dt.layer_norm(x, (8,)), lambda x, *_: F.layer_norm(x, (8,))),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8), (2, 1, 3, 8)])
def test_a_residual_may_be_added_in_place(op, shape):
    dtype = torch.float32 if op == "layer_norm" else torch.float64  # which our layer_norm does not take
    w, v = (torch.randn(8, 8, dtype=dtype) for _ in range(2))
    found = []
    for call in OPS[op]:
        x = torch.arange(float(torch.Size(shape).numel()), dtype=dtype).reshape(shape).cos().requires_grad_()
        parameters = [one.clone().requires_grad_() for one in (w, v)]
        y = call(x, *parameters)
        y += x
        y *= 2
        y.square().sum().backward()
        found.append([one.grad for one in (x, *parameters)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


def test_a_fused_model_adds_its_residual_in_place():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.f = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

        def forward(self, x):
            y = self.f(x)
            y += x
            return y

    model, x = Block(), torch.randn(2, 3, 8)
    model(x).sum().backward()
    expected = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    dt.fuse(model)
    model(x).sum().backward()
    for one, right in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, right)


def prepared(out):
    dp.prepare(dp.MatmulRequest(torch.eye(2), torch.eye(2), out=out))()


def prepared_for_another(out):
    dp.prepare(dp.MatmulRequest(torch.eye(2), torch.eye(2)))(out=out)


def submitted(out):
    with dp.Supervisor("host") as sup:
        sup.submit(dp.MatmulRequest(torch.eye(2), torch.eye(2), out=out)).result()


def submitted_with_others(out):
    with dp.Supervisor("host") as sup:
        sup.submit_many([dp.MatmulRequest(torch.eye(2), torch.eye(2), out=out)])[0].result()


def at_once(out):
    dp.matmul(torch.eye(2), torch.eye(2), out=out)


@pytest.mark.parametrize("write", [prepared, prepared_for_another, submitted, submitted_with_others, at_once])
def test_autograd_finds_that_what_it_saved_was_written(write):
    out, p = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    y = (p * out).sum()
    write(out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_bound_calls_own_result_is_known_to_be_written_again():
    call = dp.prepare(dp.MatmulRequest(torch.eye(2), torch.eye(2)))
    first = call()
    before = first._version
    assert call() is first
    assert first._version > before
