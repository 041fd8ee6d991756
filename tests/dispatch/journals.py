"""Where a journal is in tests, a product to be written down in it, and what a replay of it says."""

import json

import numpy as np
import pytest

import dispatch as dp
from dispatch.__main__ import main

PATIENCE = 120  # seconds, on a machine that has other things to do
N = 8


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.jsonl"


def product(dev, **fields):
    return dp.MatmulRequest(dev.array(np.ones((N, N), np.float32)), dev.array(np.ones((N, N), np.float32)), **fields)


def replay(path, *options):
    return main(["replay", str(path), *options])


def report(path, capsys, *options):
    """What `replay --json` says, with its exit status."""
    capsys.readouterr()
    code = replay(path, "--json", *options)
    return code, json.loads(capsys.readouterr().out)
