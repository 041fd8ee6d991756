"""Libraries whose tensors are operands, where they are installed, and the device that has them."""

from __future__ import annotations

import pytest

import dispatch as dp


def library(name):
    if name == "jax":
        pytest.importorskip("jax").config.update("jax_enable_x64", True)
    return pytest.importorskip(name)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def host():
    return dp.device("host")
