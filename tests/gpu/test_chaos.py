"""Twenty thousand requests and fifty faults on the GPU: what must hold whatever happens (tests/chaos.py)."""

from __future__ import annotations

import importlib
import time

import pytest

import dispatch as dp
from cudabind import driver

REQUESTS, FAULTS = 20_000, 50
OTHERS = 60  # seconds for which memory may be used by other processes
SLACK = 64 << 20  # bytes: the parent's own context takes some at its first copies


@pytest.mark.alone
@pytest.mark.usefixtures("trouble")
@pytest.mark.timeout(280)
def test_every_request_ends_once_and_only_the_guilty_fail(rng, record_property):
    chaos, remains = importlib.import_module("chaos"), importlib.import_module("remains")
    dev = dp.device("cuda:0")
    seed = int(rng.integers(1 << 32))
    chaos.storm("cuda:0", seed, 500, {})  # so that what this process keeps for good is there before
    dev.activate()
    before, free = remains.left_over(), driver.cuMemGetInfo()[0]
    outcome = chaos.storm("cuda:0", seed, REQUESTS, chaos.plan(seed, REQUESTS, FAULTS, on_gpu=True))
    record_property("outcome", str(outcome))
    print(f"seed {seed}: {outcome}")
    assert outcome.wrong == []
    assert sum(outcome.faults.values()) == FAULTS
    # Those that are done to the supervisor or this process have a turn but no request.
    assert outcome.requests == REQUESTS - sum(outcome.faults[kind] for kind in chaos.NO_REQUEST)
    assert outcome.mains > 0
    assert outcome.restarts >= outcome.faults["illegal address"] + outcome.faults["trap"] + outcome.faults["hang"]
    assert remains.left_behind(before) == {}
    dev.activate()
    ends = time.monotonic() + OTHERS
    while driver.cuMemGetInfo()[0] <= free - SLACK and time.monotonic() < ends:
        time.sleep(0.5)  # another process may use the GPU, too, and nothing tells how much
    assert driver.cuMemGetInfo()[0] > free - SLACK
