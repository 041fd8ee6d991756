"""Which call lost the device: those that were under way are called again in new processes, each waited for.

A GPU tells of a fault at some later call. What had been called since the last wait is written to a file, and
`differential.py --only FILE --start 0` calls it one by one: the process ends at the first that faults and says which
one it was, and another one goes on behind it.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import dispatch as dp

if TYPE_CHECKING:
    from differential_runner import Runner
    from differential_specs import Spec

FAULTED = 7  # how the process ends whose device a call has lost
PATIENCE = 300  # seconds for all that were under way: more is an endless kernel
TIMES = 6  # that each is called
PROGRAM = Path(__file__).with_name("differential.py")


def find(device: str, under_way: list[Spec]) -> str:
    """What of these calls loses the device when each is waited for; one line for each, or that none does."""
    found, start = [], 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "specs")
        path.write_bytes(pickle.dumps([_plain(spec) for spec in under_way]))
        while start < len(under_way):
            command = [sys.executable, str(PROGRAM), "--device", device, "--only", str(path), "--start", str(start)]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)
            if ran.returncode != FAULTED:
                break
            start = int(ran.stdout.split()[-1])
            found.append(f"loses the device: {under_way[start]}")
            start += 1
    each = "\n".join(f"  {spec}" for spec in under_way)
    return "\n".join(found) or f"none of these {len(under_way)} loses the device when it is waited for:\n{each}"


def replay(runner: Runner, path: str, start: int) -> int:
    """Call what `find` wrote, from one on; the exit status."""
    number = start
    try:
        specs = pickle.loads(Path(path).read_bytes())
        for number in range(start, len(specs)):
            for live in runner.lives([specs[number]]):
                for _ in range(TIMES):
                    runner.call(live)
                    runner.compare()
    except dp.errors.DeviceFault:
        print(number, flush=True)
        return FAULTED
    return 0


def _plain(spec: Spec) -> Spec:
    plain = copy.copy(spec)
    plain.check = None  # holds what no file can
    return plain
