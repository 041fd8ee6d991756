"""`dispatch.trace.profile` on the GPU: as many kernels, copies and fills as there were, and as torch's profiler counts.

Each test of what CUPTI counts runs in a process of its own: torch keeps CUPTI once its profiler was used, and a first
profile is what users have.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
START = """
import json, time
import numpy as np
import dispatch as dp
dev = dp.device("cuda:0")
rng = np.random.default_rng(0)
a, b = (dev.array(rng.standard_normal((512, 512)), "bf16") for _ in range(2))
bias, out = dev.array(rng.standard_normal(512), "bf16"), dev.empty((512, 512), "bf16")
def work():
    dp.matmul(a, b, bias=bias, epilogue=dp.Epilogue.GELU_BIAS, out=out)
    dp.softmax(out)
    dp.linalg.cholesky(spd)
m = rng.standard_normal((256, 256))
spd = dev.array(m @ m.T + 256 * np.eye(256))
"""
COUNTED_BY_TORCH = """
import torch
from torch.profiler import ProfilerActivity, profile as by_torch
for _ in range(WARM):
    work()
dev.synchronize()
with dp.trace.profile() as found:
    for _ in range(3):
        work()
with by_torch(activities=[ProfilerActivity.CUDA]) as seen:
    for _ in range(3):
        work()
    dev.synchronize()
names = [event.name for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
kernels = [name for name in names if not name.startswith(("Memcpy", "Memset"))]
again = ""
try:
    with dp.trace.profile() as later:
        work()
    again = str(len(later.kernels))
except dp.errors.DeviceUnavailable as error:
    again = str(error)
print(json.dumps({"ours": [k.name for k in found.kernels], "torch": kernels, "again": again}))
"""
COUNTED_BY_HAND = """
from cudabind import driver, nvrtc
source = b'extern "C" __global__ void counted(int *x) { atomicAdd(x, 1); }'
program = nvrtc.nvrtcCreateProgram(source, b"counted.cu", 0, [], [])
options = [b"-arch=sm_%d%d" % (
    driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0),
    driver.cuDeviceGetAttribute(driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0))]
nvrtc.nvrtcCompileProgram(program, 1, options)
cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program))
nvrtc.nvrtcGetCUBIN(program, cubin)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)))
function = driver.cuModuleGetFunction(driver.cuModuleLoadData(bytes(cubin)), b"counted")
memory = driver.cuMemAlloc(1 << 20)
host = np.ones(1 << 18, np.int32)
import ctypes
stream = driver.cuStreamCreate(0)  # which minds the order of the default stream
def launch():
    driver.cuLaunchKernel(function, 5, 2, 1, 64, 1, 1, 128, stream, ((int(memory),), (ctypes.c_void_p,)), 0)
launch()
driver.cuCtxSynchronize()
before = time.time_ns()
with dp.trace.profile() as found:
    driver.cuMemcpyHtoD(memory, host.ctypes.data, host.nbytes)
    driver.cuMemsetD8(memory, 0, 4096)
    for _ in range(LAUNCHES):
        launch()
after = time.time_ns()
driver.cuMemcpyDtoH(host.ctypes.data, memory, 4)
kernels = [(k.name, k.grid, k.block, k.shared_bytes, k.stream) for k in found.kernels]
print(json.dumps({
    "counted": int(host[0]), "kernels": len(kernels), "kinds": sorted(set(kernels)),
    "copied": [x.bytes for x in found.activities if x.name == "memcpy HTOD"],
    "filled": [x.bytes for x in found.activities if x.kind == "memset"],
    "sane": all(x.start < x.end for x in found.activities), "dropped": found.dropped,
    "begun_after": min(k.start for k in found.kernels) - before,
    "ended_before": after - max(k.end for k in found.kernels),
}))
"""
ON_TWO_THREADS = """
sup = dp.Supervisor("cuda:0", streams=2)
with sup:
    requests = [dp.MatmulRequest(a=a, b=b) for _ in range(40)]
    for future in sup.submit_many(requests):
        future.result(120)
    with dp.trace.profile() as found:
        for future in sup.submit_many(requests):
            future.result(120)
with dp.trace.profile() as alone:
    dp.matmul(a, b)
print(json.dumps({"many": len(found.kernels), "one": len(alone.kernels),
                  "streams": len({k.stream for k in found.kernels})}))
"""


def child(*parts: str) -> dict[str, Any]:
    """What a process prints last, as JSON."""
    environment = os.environ | {"PYTHONPATH": PATH}
    command = [sys.executable, "-c", "".join(parts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    print(done.stdout, done.stderr)
    if "profile() needs CUPTI" in done.stderr:
        pytest.skip("CUPTI is not installed")
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("launches", [7, 60_000])
def test_kernels_copies_and_fills_are_those_that_were_launched(launches: int) -> None:
    """60,000 records are more than a buffer holds."""
    told = child(START, f"LAUNCHES = {launches}\n", COUNTED_BY_HAND)
    assert told["kernels"] + told["dropped"] == launches
    assert told["dropped"] == 0
    assert told["counted"] == launches * 640  # threads, each of which has added 1
    (kind,) = told["kinds"]
    assert kind[:3] == ["counted", [5, 2, 1], [64, 1, 1]]
    assert kind[3] >= 128
    assert (told["copied"], told["filled"], told["sane"]) == ([1 << 20], [4096], True)
    # CUPTI's clock is the host's, to what it knows of the GPU's.
    assert told["begun_after"] > -5_000_000
    assert told["ended_before"] > -5_000_000


@pytest.mark.parametrize("calls", [1, 120])
def test_a_request_has_the_kernels_that_torchs_profiler_counts(calls: int, torch: Any) -> None:
    """After one call the library launches them; after 120 graphs do, whose kernels are listed one by one."""
    assert torch.cuda.is_available()
    told = child(START, f"WARM = {calls}\n", COUNTED_BY_TORCH)
    assert len(told["ours"]) == len(told["torch"]) >= 9
    assert len(set(told["ours"])) == len(set(told["torch"]))
    # Torch may keep CUPTI, or give it back: then it is there again.
    assert "another profiler uses CUPTI" in told["again"] or 3 * int(told["again"]) == len(told["ours"])


def test_the_workers_of_a_supervisor_are_seen() -> None:
    told = child(START, ON_TWO_THREADS)
    assert told["one"] > 0
    assert told["many"] > 0
    assert told["many"] % 40 == 0
    assert told["streams"] in (1, 2)


def test_the_example_shows_its_kernels(tmp_path: Path) -> None:
    example, trace = ROOT / "examples" / "29_profile_a_request.py", tmp_path / "trace.json"
    environment = os.environ | {"PYTHONPATH": PATH}
    command = [sys.executable, str(example), "--device", "cuda:0", "--out", str(trace)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "profile() needs CUPTI" in done.stderr:
        pytest.skip("CUPTI is not installed")
    assert done.returncode == 0, done.stdout + done.stderr
    drawn = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len([event for event in drawn if event["cat"] == "kernel"]) >= 2
    assert all(event["dur"] > 0 for event in drawn)
