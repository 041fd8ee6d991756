"""fuse(model, graphs=True) in training: what no graph stands for, and what cuts a recording short."""

import importlib.util
import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from dispatch.torch import training_graphs  # noqa: E402

spec = importlib.util.spec_from_file_location("training_steps", Path(__file__).with_name("training_steps.py"))
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
nn, BEFORE, recorder, pair, operand = steps.nn, steps.BEFORE, steps.recorder, steps.pair, steps.operand
loss_of, alike, back, step, Normed = steps.loss_of, steps.alike, steps.back, steps.step, steps.Normed

HIDDEN = torch.ones(8, requires_grad=True)


class ReadsHidden(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y * HIDDEN if len(x.shape) == 2 else y  # torch.fx, which would make it an attribute, stops here


class DrawsOnHost(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x) * random.choice([1.0, 2.0])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class CountsInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 8), [0]

    def forward(self, x):
        self.calls[0] += 1
        return self.inner(x) * self.calls[0]


class Waits(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y * (2 if y.sum().item() > 0 else 3)


class GivesOperand(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), x


class GivesWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), self.inner.weight[:4]


class WritesParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.mul_(0.99)
        return self.inner(x)


class WritesOperand(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x.add_(1))


class GivesObject(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x), object()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.inner(x)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 8, sparse=True)

    def forward(self, x):
        return self.embed(x.argmax(-1)) * 2


class OwnTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.ones(8, requires_grad=True)

    def forward(self, x):
        return x * self.w


REFUSED = {
    ReadsHidden: "not parameters of the model",
    DrawsOnHost: "random numbers on the host",
    Counts: "sets attributes",
    CountsInside: "different results",
    Waits: "cannot be captured",
    GivesOperand: "memory of an operand",
    GivesWeight: "memory of an operand",
    WritesParameter: "writes to",
    WritesOperand: "writes to",
    GivesObject: "returns a object",
    Frozen: "none of its results requires",
    Sparse: "sparse",
    OwnTensor: "not a parameter requires a gradient",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_forward_that_no_graph_stands_for(kind, recorder):
    model, twin, report = pair(kind)
    parameters = list(model.parameters())
    HIDDEN.grad = None
    for turn in range(BEFORE + 4):
        grads = []
        for one in (model, twin):
            one.zero_grad()
            random.seed(turn)
            y = one(operand(turn))
            y = y[0] if isinstance(y, tuple) else y
            if y.requires_grad:
                loss_of(y).backward()
            grads.append((y.detach(), None if HIDDEN.grad is None else HIDDEN.grad.clone()))
            HIDDEN.grad = None
        if kind is not CountsInside:  # recording runs it, too
            torch.testing.assert_close(*grads)
            if kind is not Sparse:
                alike(model, twin)
    assert report.graphs.recorded == 0
    assert any(REFUSED[kind] in reason for reason in report.graphs.reasons), report.graphs.reasons
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert len(recorder.pools) <= 1


def test_a_call_without_a_backward_pass_is_not_recorded():
    model, _, report = pair()
    for turn in range(training_graphs.UNUSED + 4):
        assert model(operand(turn)).requires_grad
    assert report.graphs.recorded == 0
    assert any("no backward pass follows" in reason for reason in report.graphs.reasons)


def test_failures_are_few():
    model, _, report = pair(Waits)
    for rows in (4, 5, 6, 7):
        for _ in range(BEFORE + 2):
            model(operand(1, rows)).sum().backward()
    assert report.graphs.reasons["recordings of other calls failed"] > 0


def test_gradients_that_are_not_finite_are_waited_for():
    model, twin, report = pair()
    for turn in range(BEFORE + 1):
        for one in (model, twin):
            one.zero_grad()
            (loss_of(one(operand(turn))) * torch.inf).backward()
    assert report.graphs.recorded == 0
    for turn in range(2 * BEFORE + 2):
        step(model, twin, turn)
    assert report.graphs.recorded == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("no memory")])
def test_what_cuts_a_recording_short_leaves_the_model_as_it_was(error, recorder):
    model, twin, report = pair(Normed)
    for turn in range(BEFORE):
        step(model, twin, turn)
    parameters = list(model.parameters())
    recorder.interrupt = error
    model.zero_grad()
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            back(model, 5)
    else:
        back(model, 5)
        back(twin, 5)
    recorder.interrupt = None
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    for turn in range(4):
        step(model, twin, turn)
    assert report.graphs.recorded == isinstance(error, KeyboardInterrupt)
