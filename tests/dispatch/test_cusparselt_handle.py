"""The handle of cuSPARSELt for executors that enqueue nothing, as those of a parent whose requests run in a child."""

from collections import defaultdict, deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cudabind.sys import cusparseLt as lt
from dispatch.libraries.cusparselt import handle


@pytest.fixture
def copying(monkeypatch):
    """An executor with neither a target nor versions: it is asked how large a compressed matrix is."""
    monkeypatch.setattr(handle, "installed", {"cusparseLt": (0, 8, 1)})
    idle = defaultdict(deque)
    idle["cusparseLt"].append((lt.cusparseLtHandle_t(), None))
    device = SimpleNamespace(idle=idle, context=nullcontext(), arch="sm_90", fault=None)
    return SimpleNamespace(device=device, handles={}, at_close=[], versions={})


def test_an_executor_that_only_copies_has_a_handle(copying):
    found = handle.handle_of(copying)
    assert found is handle.handle_of(copying)
    assert isinstance(found.c, lt.cusparseLtHandle_t)
    copying.at_close[0]()
    assert copying.device.idle["cusparseLt"][0][0] is found.c


def test_its_stamp_is_the_one_of_the_executor_that_compresses(copying):
    assert handle.library_stamp(copying) == "cusparseLt 0.8.1 sm_90"
