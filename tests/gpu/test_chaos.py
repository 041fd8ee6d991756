"""Twenty thousand requests and fifty faults on the GPU: what must hold whatever happens (tests/chaos.py)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import dispatch as dp
from cudabind import driver

REQUESTS, FAULTS = 20_000, 50
TESTS = str(Path(__file__).parents[1])
SLACK = 64 << 20  # bytes: the parent's own context takes some at its first copies


@pytest.fixture(scope="module")
def chaos():
    sys.path.insert(0, TESTS)
    trouble, module = importlib.import_module("trouble"), importlib.import_module("chaos")
    yield module
    for row in trouble.ROWS:
        dp.TABLE.unregister(row)
    del sys.modules["trouble"], sys.modules["chaos"]
    sys.path.remove(TESTS)


@pytest.mark.alone
@pytest.mark.timeout(280)
def test_every_request_ends_once_and_only_the_guilty_fail(chaos, rng, record_property):
    dev = dp.device("cuda:0")
    seed = int(rng.integers(1 << 32))
    chaos.storm("cuda:0", seed, 500, {})  # so that what this process keeps for good is there before
    dev.activate()
    before, free = chaos.left_over(), driver.cuMemGetInfo()[0]
    outcome = chaos.storm("cuda:0", seed, REQUESTS, chaos.plan(seed, REQUESTS, FAULTS, on_gpu=True))
    record_property("outcome", str(outcome))
    print(f"seed {seed}: {outcome}")
    assert outcome.wrong == []
    bursts, signals = outcome.faults["burst"], outcome.faults["kill"] + outcome.faults["stop"]
    assert sum(outcome.faults.values()) == FAULTS
    assert outcome.requests == REQUESTS - bursts - signals  # these three have a turn but no request
    assert outcome.restarts >= outcome.faults["illegal address"] + outcome.faults["trap"] + outcome.faults["hang"]
    assert chaos.left_over() == before
    dev.activate()
    assert driver.cuMemGetInfo()[0] > free - SLACK
