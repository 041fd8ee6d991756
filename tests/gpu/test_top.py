"""`python -m dispatch top` on a machine with a GPU: the readings of NVML, beside work that it can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch as dp
from cudabind import driver
from dispatch.__main__ import main
from dispatch.libraries.nvml.readings import Gpu, Gpus

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def uuid_of(device: int) -> str:
    """As NVML writes it."""
    digits = bytes(driver.cuDeviceGetUuid(driver.cuDeviceGet(device)).bytes).hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"GPU-{'-'.join(parts)}"


def seen(gpus: Gpus) -> Gpu:
    """What NVML says of the GPU that CUDA numbers 0."""
    (found,) = [gpu for gpu in gpus.read().gpus if gpu.uuid == uuid_of(0)]
    return found


def test_a_gpu_at_work_is_busy_and_draws_power(dev: dp.Device) -> None:
    a = dev.array(np.ones((8192, 8192), np.float32))
    out = dp.matmul(a, a)
    with Gpus() as gpus:
        looks, end = [], time.monotonic() + 2.0
        while time.monotonic() < end:
            for _ in range(20):
                dp.matmul(a, a, out=out)
            looks.append(seen(gpus))
            dev.synchronize()
    assert max(look.utilization or 0 for look in looks) > 50 or all(look.utilization is None for look in looks)
    for look in looks:
        assert look.power is None or 20 < look.power < 1500
        assert look.temperature is None or 10 < look.temperature < 110
        assert look.sm_clock is None or 100 < look.sm_clock < 4000
    name = driver.cuDeviceGetName(256, driver.cuDeviceGet(0)).split(b"\0")[0].decode()
    assert looks[0].name == name


@pytest.mark.alone
def test_memory_that_is_allocated_is_memory_that_it_shows(dev: dp.Device) -> None:
    size = 3 << 30
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)))
    with Gpus() as gpus:
        before = seen(gpus).memory_used
        memory = driver.cuMemAlloc(size)
        during = seen(gpus)
        driver.cuMemFree(memory)
    driver.cuDevicePrimaryCtxRelease(driver.cuDeviceGet(0))
    assert before is not None
    assert during.memory_used is not None
    assert abs(during.memory_used - before - size) < 64 << 20
    own = [each for each in during.processes if each.pid == os.getpid()]  # not where it has another number
    assert all(each.memory_used is None or each.memory_used >= size for each in own)
    assert dev.name == "cuda:0"


def test_the_command_shows_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert uuid_of(0) in [gpu["uuid"] for gpu in told["gpus"]]
    assert main(["top", "--once"]) == 0
    assert told["gpus"][0]["name"] in capsys.readouterr().out


def test_the_example_watches() -> None:
    environment = os.environ | {"PYTHONPATH": PATH}
    command = [sys.executable, str(ROOT / "examples" / "26_watch.py"), "--device", "cuda:0", "--seconds", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "busiest" in done.stdout
