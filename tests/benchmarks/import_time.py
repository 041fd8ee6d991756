"""The time of `import dispatch` in fresh processes, and which CUDA libraries it maps; bench_overhead asks."""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import TYPE_CHECKING

from fresh import run
from report import say
from timing import attempt

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
    with tempfile.TemporaryDirectory() as bytecode:
        rounds = [SCRIPT] * (runs + 1)
        outcomes = attempt("import dispatch", lambda: [json.loads(run(each, bytecode)) for each in rounds][1:], missing)
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
