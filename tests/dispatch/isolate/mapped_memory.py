"""What the tests of memory that a child maps share: how much is held, and programs in processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dispatch.device.block_allocator import GROWTH
from dispatch.supervise.process import shared_device as memory

ROOT = Path(__file__).parents[3]
PATIENCE = 120  # seconds, on a machine that has other things to do
MIB = 1 << 20
LARGE = GROWTH + MIB  # bytes of a tensor that gets a chunk of its own


def held() -> tuple[int, int]:
    """How many descriptors of shared memory this process has, and how many mappings."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself, or another thread's, is closed by now
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("memfd:dispatch" in link for link in links), sum("memfd:dispatch" in line for line in maps)


def run(program, *options, **environment):
    """Run a program in a process of its own, for it may crash; returns what it wrote."""
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=10 * PATIENCE,
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def device():
    gc.collect()
    before = held()
    made = memory.SharedHost()
    yield made
    made.close()
    gc.collect()
    assert held() == before
