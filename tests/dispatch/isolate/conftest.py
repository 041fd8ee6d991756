"""Supervisors whose children know the requests that go wrong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import dispatch as dp

TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def trouble():
    """The module tests/trouble.py, by the name by which children import it; its rows are there as long."""
    sys.path.insert(0, TESTS)
    module = importlib.import_module("trouble")
    yield module
    for row in module.ROWS:
        dp.TABLE.unregister(row)
    del sys.modules["trouble"]
    sys.path.remove(TESTS)
