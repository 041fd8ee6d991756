"""Supervisors whose workers are in a child process, requests for them, and what is close."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp

ROOT = Path(__file__).parents[3]
PATIENCE = 120  # seconds, on a machine that has other things to do
N = 16


@pytest.fixture
def open_supervisor(trouble):
    """Makes supervisors, and lets the memory of all go at the end."""
    made = []

    def make(**options):
        sup = dp.Supervisor("host", isolation="process", **{"setup": (trouble.__name__,), "streams": 2, **options})
        made.append(sup)
        return sup

    yield make
    for sup in made:
        sup.device.close()


@pytest.fixture
def hold(trouble, tmp_path):
    return trouble.Hold(tmp_path)


def child_of(sup):
    return sup._pool._child.process.pid


def pair(dev, rng):
    a, b = (rng.standard_normal((N, N)).astype(np.float32) for _ in range(2))
    return dp.MatmulRequest(dev.array(a), dev.array(b), out=dev.array(np.full((N, N), np.nan, np.float32))), a @ b


def vector(dev, value=0.0):
    return dev.array(np.full(8, value, np.float32))


def close(tensor, expected):
    return np.allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-5)


def trouble_of(sup, kind, value=3.0, **fields):
    return sys.modules["trouble"].Trouble(kind, vector(sup.device, value), vector(sup.device), **fields)
