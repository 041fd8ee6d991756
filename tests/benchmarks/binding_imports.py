"""The time of importing cudabind and each of its modules in fresh processes; bench_bindings asks.

Each import is alone in its process, so ctypes, enum and all else that it needs are in its figure. Programs that use
NumPy have most of that already: the second figure is the same import after numpy's.
"""

from __future__ import annotations

import statistics
import tempfile
from typing import TYPE_CHECKING

from fresh import run
from report import say, table
from timing import attempt, in_turns

if TYPE_CHECKING:
    from collections.abc import Iterable

    from report import Report

    import cudabind

PACKAGE = "cudabind"
SCRIPT = """
import time
import {before}
started = time.perf_counter()
import {module}
print(time.perf_counter() - started)
"""


def import_times(report: Report, runs: int, libraries: Iterable[cudabind.Library]) -> dict[str, float]:
    """Print and keep the medians of so many fresh processes each, after one that compiles the bytecode; in ms.

    Those of `cudabind` and of some libraries' modules. Returns them by module, and by "<module> after numpy".
    """
    modules = [PACKAGE, *(library.module for library in libraries)]
    cases = {module: (module, "sys") for module in modules}
    cases |= {f"{module} after numpy": (module, "numpy") for module in modules}
    found: dict[str, list[float]] = {name: [] for name in cases}
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        for number, name in in_turns(list(cases), runs + 1):
            module, before = cases[name]
            script = SCRIPT.format(module=module, before=before)
            took = attempt(name, lambda script=script: float(run(script, bytecode)), missing)
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
