"""Twenty thousand requests and fifty faults on the host: what must hold whatever happens (tests/chaos.py)."""

from __future__ import annotations

import importlib
import tempfile
import threading

import pytest

REQUESTS, FAULTS = 20_000, 50


@pytest.mark.exhaustive
@pytest.mark.usefixtures("trouble")
@pytest.mark.timeout(900)  # it takes 15 to 40 s: half of that is for children that hang or start; under load, minutes
def test_every_request_ends_once_and_only_the_guilty_fail(rng, record_property):
    chaos, remains = importlib.import_module("chaos"), importlib.import_module("remains")
    before = remains.left_over()
    seed = int(rng.integers(1 << 32))
    outcome = chaos.storm("host", seed, REQUESTS, chaos.plan(seed, REQUESTS, FAULTS, on_gpu=False))
    record_property("outcome", str(outcome))
    print(f"seed {seed}: {outcome}")
    assert outcome.wrong == []
    assert sum(outcome.faults.values()) == FAULTS
    # Those that are done to the supervisor or this process have a turn but no request.
    assert outcome.requests == REQUESTS - sum(outcome.faults[kind] for kind in chaos.NO_REQUEST)
    assert outcome.mains > 0
    assert outcome.restarts >= outcome.faults["die"] + outcome.faults["hang"]
    assert remains.left_behind(before) == {}


@pytest.mark.usefixtures("trouble")
def test_what_a_storm_leaves_behind_is_found_and_what_others_end_is_not():
    remains = importlib.import_module("remains")
    ended, wait = threading.Event(), threading.Event()
    earlier = threading.Thread(target=ended.wait, name="earlier")
    earlier.start()
    before = remains.left_over()
    later = threading.Thread(target=wait.wait, name="later")
    later.start()
    with tempfile.TemporaryFile(), tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
        assert remains.left_behind(before) == {
            "threads": ["later"],
            "descriptors": (before["descriptors"], before["descriptors"] + 2),
            "shared memory": [shared.name],
        }
    wait.set()
    later.join()
    ended.set()
    earlier.join()
    assert remains.left_behind(before) == {}
