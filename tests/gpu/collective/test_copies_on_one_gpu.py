"""Products by copies between ranks, on a machine with one GPU: two processes, each with some of the other's memory.

The link between two GPUs is what is missing here; test_parallel.py has that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
BLOCKS = ("matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul", "matmul_all_gather")


@pytest.mark.alone
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
            assert found["seconds"] < 5, "a failure frees who waits"
            assert max(found["memory"]) - min(found["memory"]) < 16 << 20, "a rank's memory is as much"
    finally:
        for process in started:
            process.kill()
            process.wait()
