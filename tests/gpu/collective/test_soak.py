"""A rank that outlives its partners: one dies every few seconds, in one way after the other, and nothing is left of it.

`SOAK_SECONDS=300 DEATH_EVERY=10 pytest tests/gpu/collective/test_soak.py -s` is the long one; here it is short.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count, cycle
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("SOAK_SECONDS", "30"))
EVERY = float(os.environ.get("DEATH_EVERY", "5"))
WAYS = ("SIGKILL", "SIGSTOP", "abort", "fault", "endless")
GRACE = 60.0  # seconds for a partner to begin, and for the survivor to go on
SLACK = 7.0  # beside the deadline of three seconds, on a machine that has other things to do

spec = importlib.util.spec_from_file_location("test_processes", HERE / "test_processes.py")
processes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(processes)


def begin(rank, port, *words, **pipes):
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1), "NCCL_NVLS_ENABLE": "0"}
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(processes.ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, str(HERE / "gpu_ranks.py"), *words]
    return subprocess.Popen(command, env=environment, start_new_session=True, text=True, **pipes)


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.usefixtures("two")
def test_a_rank_outlives_its_partners(tmp_path):
    errors = tmp_path / "errors.txt"
    told, until = [], time.monotonic() + SECONDS
    with errors.open("w") as said:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        survivor = begin(0, 2, "soak", **pipes)
        try:
            for turn, way in zip(count(), cycle(WAYS)):
                port = processes.free_port() + 1
                partner = begin(1, port, "mortal", way, str(EVERY), stdout=subprocess.DEVNULL, stderr=said)
                late = threading.Timer(EVERY + 2 * GRACE, end, (survivor,))  # one that hangs is ended, and told
                late.start()
                try:
                    survivor.stdin.write(f"{port}\n")
                    survivor.stdin.flush()
                    line = survivor.stdout.readline()
                finally:
                    late.cancel()
                    end(partner)
                assert line, f"turn {turn}, {way}: the survivor ended, {errors.read_text()[-4000:]}"
                told.append({"way": way, **json.loads(line)})
                print(told[-1])
                if time.monotonic() > until and turn >= len(WAYS) - 1:
                    break
        finally:
            end(survivor)
    for each in told:
        assert each["error"] in ("RankLost", "CollectiveTimeout", "CollectiveError"), each
        assert each["took"] < 3 + SLACK, each
        assert (each["right"], each["after"], each["kept"], each["size"]) == (True, True, True, 1), each
    early, last = told[min(len(told), len(WAYS)) - 1], told[-1]
    assert last["files"] <= early["files"] + 8, (early, last)
    assert last["threads"] <= early["threads"] + 4, (early, last)
    if early["in_use"] is not None:
        assert last["in_use"] <= early["in_use"] + (64 << 20), (early, last)
    print(f"{len(told)} deaths in {SECONDS:g} s: {[each['error'] for each in told]}")
