"""Host time of one call through the bindings: 0, 5, 10 and 16 arguments, against bare ctypes and NVIDIA's own bindings.

Exact counts come from a small C library that does nothing, built with gcc; real functions of the libraries follow, on
descriptors that need no GPU. Besides: the price of binding a function, and what the imports take in new processes.
Repeat: `python tests/benchmarks/bench_bindings.py [--quick] [--device cuda:0|host] [--json FILE]`; about 60 s, 15 s
with --quick. Only the 16 arguments of cuBLAS need a GPU; nvmath-python needs a driver.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import binding_calls as calls
from binding_imports import import_times
from command import command
from report import Report, Target, judge, say, table
from timing import attempt, host_race, summary

from cudabind import LIBRARIES, Library
from cudabind._bind import functions
from cudabind.errors import CudaError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from binding_calls import Row

    import dispatch as dp

WITH_STATUS = [f"counted{count}" for count in calls.COUNTS]
TARGETS = (
    *(Target("unchecked", f"{n}, {calls.UNCHECKED}", 1.05, "ns", f"{n}, {calls.BARE}") for n in WITH_STATUS),
    *(Target("checked, beyond bare ctypes", f"{n}, checking", 120, "ns") for n in WITH_STATUS),
    Target("import cudabind, beyond numpy", "cudabind after numpy", 60, "ms"),
    *(
        Target("import of a sys module", library.module, 40, "ms")
        for library in LIBRARIES.values()
        if library.module.startswith("cudabind.sys.")
    ),
)


def collect(device: dp.Device, folder: Path, stack: contextlib.ExitStack, missing: dict[str, str]) -> list[Row]:
    """All rows that can be had here, with those peers that can; the rest goes into `missing` with the reason."""
    kinds: dict[str, Callable[[], Row]] = {
        "cublasLtGetVersion": calls.lt_version,
        "cublasLtMatrixLayoutGetAttribute": calls.lt_layout,
        "cusparseCooGet": calls.sparse_coo,
        "cudnnGetRNNDescriptor_v8": calls.dnn_rnn,
        "cudaRuntimeGetVersion": calls.runtime_version,
        "cudaCreateChannelDesc": calls.runtime_channel,
    }
    if not device.is_host:
        kinds["cublasSgemvStridedBatched"] = calls.blas_gemv
    rows = attempt("counted", lambda: stack.enter_context(calls.counted_rows(folder)), missing) or []
    rows += [made for name, make in kinds.items() if (made := attempt(name, make, missing))]
    for row in rows:
        if row.name in calls.NVMATH_NAMES:
            name = f"{row.name}, {calls.NVMATH}"
            peer = attempt(name, lambda row=row: calls.with_nvmath(row), missing)
            row.ways.update({calls.NVMATH: peer} if peer else {})
    return rows


def race(row: Row, quick: bool, missing: dict[str, str]) -> dict[str, dict[str, float]]:
    """Nanoseconds per call by way, of those that do what they should: a call that does nothing must not win."""
    right = []
    for candidate in row.candidates():
        name = f"{row.name}, {candidate.name}"
        result = attempt(name, lambda run=candidate.result: (run(),), missing)
        if result == (row.want,):
            right.append(candidate)
        elif result is not None:
            missing[name] = f"wrong result: {result[0]} instead of {row.want}"
    bursts, each = (7, 2000) if quick else (60, 10_000)
    seconds, failed = host_race(right, lambda: None, bursts=bursts, calls=each)
    missing |= {f"{row.name}, {way}": why for way, why in failed.items()}
    return {way: summary(values, 1e-9) for way, values in seconds.items()}


def races(device: dp.Device, report: Report, quick: bool) -> dict[str, float]:
    """Print and keep what every call costs in every way, in nanoseconds; returns the best of each.

    The best and not the median, because nothing here waits for a device: whatever makes a burst slower is not the call.
    """
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        rows = collect(device, Path(folder), stack, missing)
        figures = {row.name: race(row, quick, missing) for row in rows}
    say("\nns per call, best of the bursts; the loop around it is in every figure")
    lines = []
    for row in rows:
        found = figures[row.name]
        lines.append((row.name, str(row.count), *(_cell(found, way) for way in calls.WAYS), ""))
    table(("", "arguments", *calls.WAYS, ""), lines)
    for name, why in missing.items():
        say(f"missing: {name}: {why}")
    report.put("calls", {"ns": figures, "arguments": {row.name: row.count for row in rows}, "missing": missing})
    best = {f"{name}, {way}": f["best"] for name, ways in figures.items() for way, f in ways.items()}
    for name, found in figures.items():
        if {calls.CHECKED, calls.BARE} <= found.keys():
            best[f"{name}, checking"] = found[calls.CHECKED]["best"] - found[calls.BARE]["best"]
    return best


def _cell(found: dict[str, dict[str, float]], way: str) -> str:
    return f"{found[way]['best']:.0f}" if way in found else "-"


def binding(report: Report, libraries: Sequence[Library]) -> None:
    """Print and keep what the first use of a function costs, over all functions of each library that is installed."""
    lines = []
    for library in libraries:
        if library.module.startswith("cudabind.sys."):
            took = _bind_all(importlib.import_module(library.module))
            if took:
                lines.append((library.name, str(len(took)), f"{statistics.median(took):.0f}", f"{max(took):.0f}", ""))
                report.put(f"binding {library.name}", summary(took, 1))
    say("\nbinding a function at its first use, us")
    table(("", "functions", "median", "worst", ""), lines)


def _bind_all(module: Any) -> list[float]:
    took = []
    for name in functions(module):
        started = time.perf_counter()
        with contextlib.suppress(CudaError):  # not installed, or not in this version
            _ = getattr(module, name).unchecked
            took.append(1e6 * (time.perf_counter() - started))
    return took


def main(device: dp.Device, quick: bool, report: Report) -> None:
    """Measure everything and print it with the targets."""
    libraries = [*LIBRARIES.values()]
    if quick:  # the first of each area, and cuBLAS
        first = {library.area: library for library in reversed(libraries)}
        libraries = [LIBRARIES["cublasLt"], LIBRARIES["cublas"], *first.values()]
    figures = import_times(report, 1 if quick else 15, libraries)
    figures |= races(device, report, quick)
    binding(report, libraries)
    judge(TARGETS, figures, report)


if __name__ == "__main__":
    command(main, __doc__, device="auto")
