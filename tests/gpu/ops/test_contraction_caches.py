"""cuTENSOR's caches on disk on the GPU: what one process has compiled or tuned is there in the next."""

import itertools
import json
import os
import subprocess
import sys

import pytest

import dispatch as dp
from dispatch.keys import HOST

PROGRAM = """
import json, logging, time, sys
import numpy as np
import dispatch as dp
from cudabind import driver
from dispatch.execute.library_cache import LibraryCache

logging.basicConfig()  # why a cache was not read, or not written
dev, choices = dp.device("cuda:0"), json.loads(sys.argv[1])
read, load = [], LibraryCache.load
LibraryCache.load = lambda self, by: read.append(load(self, by)) or read[-1]
rng = np.random.default_rng(5)
x, y = rng.standard_normal((24, 30, 20)), rng.standard_normal((20, 18, 30))
kind = choices.pop("kind")
a, b = dev.array(x.astype(kind)), dev.array(y.astype(kind))
times = []
with dev.context:
    free, total = driver.cuMemGetInfo()
print(f"{free >> 20} of {total >> 20} MiB are free", file=sys.stderr)
with dev.stream():
    for turn in range(choices.pop("calls")):
        print("call", turn, file=sys.stderr, flush=True)
        begin = time.perf_counter()
        got = dp.contract("ikl,ljk->ij", a, b, library="cutensor", **choices)
        dev.synchronize()
        times.append(time.perf_counter() - begin)
        off = np.abs(got.numpy() - np.einsum("ikl,ljk->ij", x, y)).max()
        assert off < 1e-3, (turn, off)
print(json.dumps({"read": read, "first": times[0], "last": times[-1]}))
"""


@pytest.fixture(autouse=True)
def _cutensor(skip_without):
    skip_without(next(row for row in dp.TABLE.of("contract") if row.library == "cutensor" and row.min_arch != HOST))


NUMBERS = itertools.count(1)
FATAL = "Fatal Python error"  # with which faulthandler begins: the innermost call comes first
UNREAD = "cutensorHandleReadPlanCacheFromFile"
LOGGED = 6000  # characters of cuTENSOR's log that are shown


def process(folder, **choices):
    """What another process says of its contractions; all that it wrote, and what cuTENSOR did last, where it fails."""
    number, logs = next(NUMBERS), folder / "logs"
    logs.mkdir(exist_ok=True)
    traced = logs / f"{number}.txt"
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, json.dumps(choices)],
        env={
            **os.environ,
            "CUDABIND_CACHE": str(folder / "cache"),
            "CUTENSOR_LOG_LEVEL": "5",
            "CUTENSOR_LOG_FILE": str(traced),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    if ran.returncode:
        told = traced.read_text(errors="replace")[-LOGGED:] if traced.exists() else "nothing"
        print(f"process {number} of {choices} wrote to stdout:\n{ran.stdout}\nto stderr:\n{ran.stderr}")
        print(f"cuTENSOR's log ends with:\n{told}")
        where = max(ran.stderr.find(FATAL), 0)
        pytest.fail(f"process {number} ended with {ran.returncode}:\n{ran.stderr[where:][:1200]}", pytrace=False)
    print(f"process {number} of {choices} wrote to stderr:\n{ran.stderr[-LOGGED:]}")  # also why a cache was not read
    return json.loads(ran.stdout.splitlines()[-1]) | {"unread": UNREAD in ran.stderr and "INTERNAL_ERROR" in ran.stderr}


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_a_kernel_is_compiled_once_for_all_processes(gpu, tmp_path, kind):
    first, second = (process(tmp_path, jit=True, calls=2, kind=kind) for _ in range(2))
    print(f"jit of {kind} on {gpu.model}: first process {first}, second {second}")
    files = [*tmp_path.glob("cache/library-kernels-*.cache")]
    print("files:", [(file.name, file.stat().st_size) for file in files])
    if not files:
        pytest.skip("cuTENSOR has compiled nothing here: it does so where NVRTC is there, and a kernel is worth it")
    assert first["read"] == [False]
    assert second["read"] == [True]
    assert second["first"] < first["first"]
    (file,) = files
    file.write_bytes(file.read_bytes()[:-5])
    third = process(tmp_path, jit=True, calls=2, kind=kind)
    assert third["read"] == [False]
    assert process(tmp_path, jit=True, calls=2, kind=kind)["read"] == [True]


@pytest.mark.parametrize("kind", ["f4", "f8"])
def test_plans_are_tuned_once_for_all_processes(gpu, tmp_path, kind):
    first, second = (process(tmp_path, incremental_count=6, calls=40, kind=kind) for _ in range(2))
    print(f"incremental autotune of {kind} on {gpu.model}: first process {first}, second {second}")
    (file,) = tmp_path.glob("cache/library-plans-*.cache")
    assert first["read"] == [False]
    if second["unread"]:  # whole, as its digest says, and yet cuTENSOR 2.8.1 fails, three times of six, of f32 alone
        assert second["read"] == [False]
        pytest.xfail(
            "cuTENSOR did not read what it had written itself; the plan was tuned once more, with right results"
        )
    assert second["read"] == [True]
    file.write_bytes(b"x" + file.read_bytes())
    assert process(tmp_path, incremental_count=6, calls=8, kind=kind)["read"] == [False]
