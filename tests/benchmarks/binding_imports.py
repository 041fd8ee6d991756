"""The time of importing cudabind and each of its modules in fresh processes; bench_bindings asks.

Each import is alone in its process, so ctypes, enum and all else that it needs are in its figure. Programs that use
NumPy have most of that already: the second figure is the same import after numpy's.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from report import say, table
from timing import attempt, in_turns

import cudabind

if TYPE_CHECKING:
    from report import Report

PACKAGE = "cudabind"
SCRIPT = """
import time
import {before}
started = time.perf_counter()
import {module}
print(time.perf_counter() - started)
"""


def import_times(report: Report, runs: int) -> dict[str, float]:
    """Print and keep the medians of so many fresh processes each, after one that compiles the bytecode; in ms.

    Returns them by module, and by "<module> after numpy".
    """
    modules = [PACKAGE, *(library.module for library in cudabind.LIBRARIES.values())]
    cases = {module: (module, "sys") for module in modules}
    cases |= {f"{module} after numpy": (module, "numpy") for module in modules}
    found: dict[str, list[float]] = {name: [] for name in cases}
    missing: dict[str, str] = {}
    for number, name in in_turns(list(cases), runs + 1):
        took = attempt(name, lambda case=cases[name]: _once(*case), missing)
        if took is not None and number:  # the first round compiles the bytecode
            found[name].append(took * 1000)
    medians = {name: statistics.median(values) for name, values in found.items() if values}
    say(f"\nimport, ms, median of {runs} fresh processes")
    rows = [(module, *(f"{medians.get(f'{module}{after}', float('nan')):.1f}" for after in ("", " after numpy")), "")
            for module in modules]  # fmt: skip
    table(("", "alone", "after numpy", ""), rows)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("imports", {"ms": medians, "all": found, "missing": missing})
    return medians


def _once(module: str, before: str) -> float:
    """One import in a process of its own, of the very package that this process has."""
    root = str(Path(cudabind.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", SCRIPT.format(module=module, before=before)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path}, timeout=60
    )
    return float(done.stdout)
