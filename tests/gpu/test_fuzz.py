"""The fuzz of tests/dispatch/test_fuzz.py on a GPU: the same 5,000 mistakes, and the GPU is healthy afterwards."""

import importlib.util
from pathlib import Path

import pytest

import dispatch

SOURCE = Path(__file__).parents[1] / "dispatch" / "test_fuzz.py"
spec = importlib.util.spec_from_file_location("the_fuzz", SOURCE)
the_fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(the_fuzz)
launches = the_fuzz.launches  # the fixture


@pytest.mark.parametrize("name", ["cuda:0"])
def test_malformed_requests_raise_and_never_reach_the_gpu(name, rng, launches):
    scene, seen = the_fuzz.fuzz(name, rng, launches)
    assert set(seen) == {mistake.__name__ for mistake in the_fuzz.MISTAKES}
    the_fuzz.check_good_requests(scene, launches)
    dispatch.device(name).synchronize()
