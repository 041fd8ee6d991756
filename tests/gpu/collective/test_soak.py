"""A rank that outlives its partners: one dies every few seconds, in one way after the other, and nothing is left of it.

What is an option stands in the environment: for how many seconds at least (SOAK_SECONDS), and how many deaths
(SOAK_DEATHS), in which ways (SOAK_WAYS), and how many seconds a partner lives beside its beginning (DEATH_EVERY). Five
minutes with some death every ten seconds: `SOAK_SECONDS=300 DEATH_EVERY=5 pytest tests/gpu/collective/test_soak.py -s`;
twenty in each way: `SOAK_DEATHS=100 DEATH_EVERY=0.5`, or for one of them `SOAK_DEATHS=20 SOAK_WAYS=SIGKILL`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WAYS = os.environ.get("SOAK_WAYS", "SIGKILL,SIGSTOP,abort,fault,endless").split(",")
SECONDS = float(os.environ.get("SOAK_SECONDS", "20"))
DEATHS = int(os.environ.get("SOAK_DEATHS", str(len(WAYS))))
EVERY = float(os.environ.get("DEATH_EVERY", "2"))
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
    for pipe in filter(None, (process.stdin, process.stdout)):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


class Partner:
    """A process that is to die; it is begun while the one before is at work, for that takes seconds."""

    def __init__(self, way, said):
        self.way, self.port = way, processes.free_port() + 1
        words = ("mortal", way, str(EVERY))
        self.process = begin(1, self.port, *words, stdout=subprocess.DEVNULL, stderr=said)


@pytest.mark.timeout(int(SECONDS + DEATHS * (EVERY + 15) + 2 * GRACE))
@pytest.mark.usefixtures("two")
def test_a_rank_outlives_its_partners(tmp_path):
    errors, told = tmp_path / "errors.txt", []
    with errors.open("w") as said:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": said}
        ways, survivor = cycle(WAYS), begin(0, 2, "soak", **pipes)
        partners = [Partner(next(ways), said)]
        begun = time.monotonic()
        try:
            while len(told) < DEATHS or time.monotonic() < begun + SECONDS:
                partners.append(Partner(next(ways), said))
                partner = partners.pop(0)
                try:
                    told.append({"way": partner.way, **outlived(survivor, partner, errors)})
                finally:
                    end(partner.process)
                print(f"{time.monotonic() - begun:6.1f} s: {told[-1]}")
        finally:
            for process in (survivor, *(each.process for each in partners)):
                end(process)
    for each in told:
        assert each["error"] in ("RankLost", "CollectiveTimeout", "CollectiveError"), each
        assert each["took"] < 3 + SLACK, each
        assert (each["right"], each["after"], each["kept"], each["size"]) == (True, True, True, 1), each
    early, last = told[min(len(told), len(WAYS)) - 1], told[-1]
    assert last["files"] <= early["files"] + 8, (early, last)
    assert last["threads"] <= early["threads"] + 4, (early, last)
    if early["in_use"] is not None:
        assert last["in_use"] <= early["in_use"] + (64 << 20), (early, last)
    counts = Counter((each["way"], each["error"]) for each in told)
    print(f"{len(told)} deaths in {time.monotonic() - begun:.0f} s: {dict(counts)}")


def outlived(survivor, partner, errors):
    """What the survivor tells of a partner's death."""
    late = threading.Timer(EVERY + 2 * GRACE, end, (survivor,))  # one that hangs is ended, and told
    late.start()
    try:
        survivor.stdin.write(f"{partner.port}\n")
        survivor.stdin.flush()
        line = survivor.stdout.readline()
    finally:
        late.cancel()
    assert line, f"{partner.way}: the survivor ended: {errors.read_text()[-4000:]}"
    return json.loads(line)
