"""Supervisors whose children know the requests that go wrong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[2])


@pytest.fixture(scope="session")
def trouble():
    """The module tests/trouble.py, by the name by which children import it."""
    sys.path.insert(0, TESTS)
    module = importlib.import_module("trouble")
    yield module
    sys.path.remove(TESTS)
