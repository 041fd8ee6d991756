"""NCCL on two GPUs: what its tests ask for. NVLink multicast stays off."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from cudabind import driver
from cudabind.errors import LibraryNotFound
from dispatch.libraries.nccl.config import version

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
CASES = Path(__file__).parents[2] / "dispatch" / "world" / "collective_cases.py"


@pytest.fixture(scope="session")
def nccl() -> tuple[int, int, int]:
    """The version of NCCL; a skip where it is not installed."""
    try:
        return version()
    except LibraryNotFound as error:
        pytest.skip(str(error))


@pytest.fixture
def two(nccl) -> list[str]:
    """The names of two GPUs."""
    if int(driver.cuDeviceGetCount()) < 2:
        pytest.skip("needs two GPUs")
    assert nccl
    return ["cuda:0", "cuda:1"]


@pytest.fixture(scope="session")
def collective_cases():
    spec = importlib.util.spec_from_file_location("collective_cases", CASES)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def captured_cases():
    spec = importlib.util.spec_from_file_location("captured_cases", Path(__file__).with_name("captured_cases.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
