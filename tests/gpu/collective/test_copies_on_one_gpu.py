"""Products by copies between ranks, on a machine with one GPU: two threads, and two processes.

The link between two GPUs is what is missing here; test_parallel.py has that.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dispatch.parallel import peers

HERE = Path(__file__).parent
BLOCKS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")


@pytest.fixture
def one_gpu(monkeypatch):
    for name in ("all_gather", "all_reduce"):  # which it replaces
        monkeypatch.setattr(peers, name, getattr(peers, name))
    spec = importlib.util.spec_from_file_location("blocks_by_copies", HERE / "blocks_by_copies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blocks_of_two_threads_one_behind_the_other(one_gpu):
    assert one_gpu.threads(one_gpu.one_behind_the_other) == ([], [])


@pytest.mark.parametrize("name", BLOCKS)
def test_graphs_of_two_threads_between_calls(one_gpu, name):
    found = one_gpu.threads(lambda comm: one_gpu.graphs(comm, name, comm.meet))
    assert found == ([True] * 9, [True] * 9)


def test_a_failure_frees_who_waits(one_gpu):
    took, _ = one_gpu.threads(one_gpu.left_alone)
    assert took < 5


def test_memory_goes_back_with_the_communicator(one_gpu):
    (before, amid, after), _ = one_gpu.threads(one_gpu.memory_goes_back)
    print(before, amid, after)
    assert amid <= before - 2 * (16 << 20), "of two ranks, 16 MiB each"
    assert after >= amid + 2 * (16 << 20)


def test_blocks_of_two_processes(tmp_path):
    root, address = str(HERE.parents[2]), str(tmp_path / "line")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, str(HERE / "blocks_by_copies.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    started = [subprocess.Popen([*command, "0", address], **pipes)]
    try:
        while not Path(address).exists():
            assert started[0].poll() is None, started[0].communicate()[1][-4000:]
            time.sleep(0.01)
        started.append(subprocess.Popen([*command, "1", address], **pipes))
        for process in started:
            output, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-4000:]
            found = json.loads(output.splitlines()[-1])
            print(found)
            assert found["wrong"] == []
            assert found["graphs"] == {name: [True] * 9 for name in BLOCKS}
            assert found["free"] < 5
    finally:
        for process in started:
            process.kill()
            process.wait()
