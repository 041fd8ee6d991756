"""Models that are trained with graphs and without, step by step, and held against each other; no GPU is needed."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from dispatch.torch import fuse, training_graphs

spec = importlib.util.spec_from_file_location("recorded_ops", Path(__file__).with_name("recorded_ops.py"))
recorded_ops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recorded_ops)

nn = torch.nn
BEFORE = training_graphs.RUNS_BEFORE


@pytest.fixture(autouse=True)
def recorder(monkeypatch):
    return recorded_ops.patch(monkeypatch)


class Net(nn.Module):
    def __init__(self, dropped=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
        self.dropout = nn.Dropout(dropped)
        self.scale = 2.0

    def forward(self, x, times=1, *, minus=None):
        y = self.dropout(x + self.mlp(self.norm(x))) * (self.scale * times)
        return y if minus is None else y - minus


def pair(build=Net):
    """A model with graphs, its like without, and the report."""
    torch.manual_seed(0)
    model = build().train()
    twin = copy.deepcopy(model)
    report = fuse(model, graphs=True)
    fuse(twin)
    return model, twin, report


def operand(turn, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(turn))


def loss_of(y):
    return (y * y).mean() + y.sum() / 7


def alike(model, twin):
    """Gradients, parameters and buffers are the same."""
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")
        torch.testing.assert_close(p, q, msg=lambda text, name=name: f"{name}: {text}")
    for (name, b), c in zip(model.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(b, c, msg=lambda text, name=name: f"{name}: {text}")


def back(model, turn, *args, **kwargs):
    torch.manual_seed(1000 + turn)
    y = model(operand(turn), *args, **kwargs)
    loss_of(y).backward()
    return y.detach()


def step(model, twin, turn, *args, **kwargs):
    """Forward and backward of both, from nothing, are alike."""
    model.zero_grad()
    twin.zero_grad()
    torch.testing.assert_close(back(model, turn, *args, **kwargs), back(twin, turn, *args, **kwargs))
    alike(model, twin)


def recorded(build=Net):
    """A pair whose step was recorded and replayed."""
    model, twin, report = pair(build)
    for turn in range(BEFORE + 2):
        step(model, twin, turn)
    assert (report.graphs.recorded, report.graphs.replayed) == (1, 2), report.graphs
    return model, twin, report


def replays(report, action):
    """How many calls in it were replays."""
    before = report.graphs.replayed
    action()
    return report.graphs.replayed - before


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.inner(x))


class Writes(nn.Module):
    """Writes to a buffer in place, and reads what it was."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        y = self.inner(x) + self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        return y


class Product(nn.Module):
    """With a gradient of its gradient."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return (x @ self.w).tanh()
