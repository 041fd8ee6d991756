"""What every test on a GPU may ask for: the device, and the libraries that tensors are exchanged with."""

from __future__ import annotations

from typing import Any

import pytest

import dispatch as dp


@pytest.fixture
def dev() -> dp.Device:
    return dp.device("cuda:0")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")
