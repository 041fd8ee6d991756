"""The time of `import dispatch` in fresh processes, and which CUDA libraries it maps; bench_overhead asks."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from report import say
from timing import attempt

import dispatch

if TYPE_CHECKING:
    from report import Report

SCRIPT = """
import json, re, time
started = time.perf_counter()
import dispatch
took = time.perf_counter() - started
names = "cuda|cublas|cudnn|cufft|curand|cusolver|cusparse|cutensor|nccl|nvrtc|nvJitLink|nvvm"
maps = open("/proc/self/maps").read()
print(json.dumps([took, sorted(set(re.findall(rf"/\\S*/lib(?:{names})\\S*", maps)))]))
"""


def import_time(report: Report, runs: int) -> dict[str, float]:
    """Print and keep best and median of so many fresh processes, after one that compiles the bytecode; in seconds."""
    missing: dict[str, str] = {}
    outcomes = attempt("import dispatch", lambda: [_once() for _ in range(runs + 1)][1:], missing)
    if outcomes is None:
        say(f"\nimport dispatch: missing: {missing['import dispatch']}")
        report.put("import dispatch", {"missing": missing["import dispatch"]})
        return {}
    seconds = [took for took, _ in outcomes]
    libraries = outcomes[-1][1]
    middle, best = statistics.median(seconds), min(seconds)
    say(f"\nimport dispatch: median {middle:.3f} s, best {best:.3f} s of {runs} fresh processes")
    say(f"CUDA libraries mapped by it: {', '.join(libraries) or 'none (ok)'}")
    report.put("import dispatch", {"seconds": seconds, "median": middle, "best": best, "libraries": libraries})
    return {"import dispatch": middle}


def _once() -> tuple[float, list[str]]:
    """One import in a process of its own, of the very package that this process has."""
    root = str(Path(dispatch.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environ, timeout=60)
    took, libraries = json.loads(done.stdout)
    return took, libraries
