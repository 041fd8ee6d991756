"""fuse(model, graphs=True) in training: operands and results of all kinds, and which of them have gradients."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils import _pytree  # noqa: E402

spec = importlib.util.spec_from_file_location("training_steps", Path(__file__).with_name("training_steps.py"))
steps = importlib.util.module_from_spec(spec)
spec.loader.exec_module(steps)
nn, BEFORE, recorder, Net, pair, operand = steps.nn, steps.BEFORE, steps.recorder, steps.Net, steps.pair, steps.operand
loss_of, alike, recorded, replays = steps.loss_of, steps.alike, steps.recorded, steps.replays


@dataclass
class Output:
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden: tuple | None = None
    name: str = ""


_pytree.register_pytree_node(
    Output, lambda y: ([y.loss, y.logits, y.hidden, y.name], None), lambda values, _: Output(*values)
)


class Rich(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.net = Net()
        self.head, self.aside = nn.Linear(8, 5), nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, tokens, labels=None, *, x=None):
        h = self.embed(tokens) if x is None else self.embed(tokens) + x
        h = self.net(h)
        logits = self.head(h)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        with torch.no_grad():
            best = logits.argmax(-1)
            top = logits.amax(-1)
        return Output(loss, logits, (h, h, self.aside(h), best, top), "rich")


def tokens(turn):
    return torch.randint(0, 20, (2, 3), generator=torch.Generator().manual_seed(turn))


def rich_step(models, turn, loss, **given):
    found = []
    for one in models:
        one.zero_grad()
        y = one(tokens(turn), **given)
        loss(y).backward()
        found.append(y)
    for a, b in zip(*(_pytree.tree_leaves(y) for y in found), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a.detach(), b.detach())
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b
    alike(*models)
    return found[0]


def test_results_of_all_kinds_and_parameters_without_a_gradient():
    model, twin, report = pair(Rich)
    for turn in range(BEFORE + 4):
        y = rich_step((model, twin), turn, lambda y: y.loss, labels=tokens(turn + 50) % 5)
    assert report.graphs.replayed == 4
    assert isinstance(y, Output)
    assert y.name == "rich"
    assert y.hidden[0] is y.hidden[1]
    assert model.unused.weight.grad is None
    assert model.aside.weight.grad is None, "no result of it was given a gradient"
    for turn in range(BEFORE + 4):
        rich_step((model, twin), turn, lambda y: y.logits.square().mean() + y.hidden[2].sum())
    assert report.graphs.recorded == 2


def test_other_results_are_given_gradients_than_before():
    model, twin, report = pair(Rich)
    labels = tokens(50) % 5
    for turn in range(BEFORE + 2):
        rich_step((model, twin), turn, lambda y: y.loss, labels=labels)
    rich_step((model, twin), 9, lambda y: y.loss + y.hidden[2].sum(), labels=labels)
    assert any("gradients are given for other results" in reason for reason in report.graphs.reasons), (
        report.graphs.reasons
    )
    assert replays(report, lambda: rich_step((model, twin), 9, lambda y: y.logits.mean(), labels=labels)) == 0


def test_results_that_have_gradients_now_here_now_there_are_not_recorded():
    model, twin, report = pair(Rich)
    for turn in range(BEFORE + 4):
        rich_step((model, twin), turn, lambda y, turn=turn: y.logits.mean() if turn % 2 else y.hidden[2].mean())
    assert report.graphs.recorded == 0
    assert any("different results have gradients" in reason for reason in report.graphs.reasons)


def test_operands_have_gradients_too():
    model, twin, report = pair(Rich)
    for turn in range(BEFORE + 3):
        given = [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(turn)) for _ in range(2)]
        leaves = [x.requires_grad_() for x in given]
        for one, x in zip((model, twin), leaves, strict=True):
            one.zero_grad()
            loss_of(one(tokens(turn), x=x * 2).logits).backward()
        torch.testing.assert_close(*(x.grad for x in leaves))
        alike(model, twin)
    assert report.graphs.replayed == 3
    x = torch.randn(2, 3, 8)
    assert replays(report, lambda: loss_of(model(tokens(0), x=x).logits).backward()) == 0, "it asks for none"


def test_a_gradient_of_operands_alone():
    model, _, report = recorded()
    for p in model.parameters():
        p.requires_grad_(False)
    for turn in range(2 * BEFORE + 3):
        x = operand(turn).requires_grad_()
        loss_of(model(x)).backward()
        want = operand(turn).requires_grad_()
        loss_of(Net.forward(model, want)).backward()
        torch.testing.assert_close(x.grad, want.grad)
    assert report.graphs.recorded == 2


def test_an_operand_that_is_given_twice_and_one_in_pieces():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x, y):
            return x * self.w + 3 * y

    model, _, report = pair(Sum)
    for turn in range(BEFORE + 2):
        x = operand(turn).requires_grad_()
        z = (x * 1)[:, ::2].repeat(1, 2)
        model(z, z).sum().backward()
        want = torch.zeros(4, 8)
        want[:, ::2] = 8
        torch.testing.assert_close(x.grad, want)
    assert report.graphs.replayed == 2
