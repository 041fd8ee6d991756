"""What the benchmarks print and keep: aligned tables, targets with a verdict, and a JSON file that grows as they run.

The file is replaced whole after every figure, so that a run that is cut off leaves what it had. Nothing here measures.
"""

from __future__ import annotations

import json
import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudabind._terminal import columns, width

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvmath-python", "nvidia-cublas", "cuda-bindings", "numpy")


class Report:
    """The figures of one benchmark, on disk from the first one on."""

    def __init__(self, json_path: str | None) -> None:
        self.figures: dict[str, Any] = {}
        self._path = None if json_path is None else Path(json_path)

    def put(self, name: str, value: Any) -> None:
        """Keep a figure, in place of the one of that name."""
        self.figures[name] = value
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.with_name(f"{self._path.name}.part")
        whole.write_text(json.dumps(self.figures, indent=1) + "\n", encoding="utf-8")
        os.replace(whole, self._path)


def environment(device: Any) -> dict[str, Any]:
    """Machine and versions that the figures hold for."""
    facts: dict[str, Any] = {"python": platform.python_version(), "cpu": _cpu(), "device": str(device)}
    if not device.is_host:
        from cudabind import _load, driver

        facts["gpu"] = device.model
        facts["driver"] = _first(Path("/proc/driver/nvidia/version"), r"\s(\d+\.\d+(?:\.\d+)?)\s")
        facts["cuda"] = int(driver.cuDriverGetVersion())
        facts["cublasLt"] = f"{_load.version('cublasLt')} ({_load.path('cublasLt')})"
    facts["packages"] = {name: version for name in PACKAGES if (version := _version(name))}
    return facts


def mapped(pattern: str) -> list[str]:
    """The files mapped into this process whose name matches; with two of one library, unlike things are compared."""
    found = re.findall(rf"/\S*/{pattern}\S*", _text(Path("/proc/self/maps")))
    return sorted(set(found))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _first(path: Path, pattern: str) -> str | None:
    match = re.search(pattern, _text(path))
    return match[1] if match else None


def _cpu() -> str:
    return _first(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.machine()


def say(text: str = "") -> None:
    """Print one line, at once: a run that is cut off has shown what it had."""
    print(text, flush=True)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in columns: the first and the last to the left, figures between them to the right.

    On a terminal that is too narrow for them all are to the left, and folded.
    """
    lines = [tuple(heads), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    room = width()
    if room is not None and sum(widths) + 2 * (len(widths) - 1) > room:
        say("\n".join(columns(lines, room)[0]))
        return
    last = len(widths) - 1
    for line in lines:
        cells = [
            cell.ljust(size) if number in (0, last) else cell.rjust(size)
            for number, (cell, size) in enumerate(zip(line, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


@dataclass(frozen=True)
class Target:
    """An aim: a figure's limit in its own unit, or as a multiple of a peer's figure."""

    what: str
    figure: str
    limit: float
    unit: str = ""
    peer: str | None = None
    at_least: bool = False

    def judge(self, figures: dict[str, float]) -> dict[str, str]:
        """The cells of a row: target, limit, measured, ratio, verdict; a missing figure gives no verdict."""
        sign = "≥" if self.at_least else "≤"
        limit = f"{sign} {self.limit:g} of {self.peer}" if self.peer else f"{sign} {self.limit:g} {self.unit}".rstrip()
        value, base = figures.get(self.figure), 1.0 if self.peer is None else figures.get(self.peer)
        cells = {"target": self.what, "limit": limit, "measured": "-", "ratio": "-"}
        if value is None or base is None:
            return cells | {"verdict": f"no verdict: {self.figure if value is None else self.peer} is missing"}
        ratio = value / base
        met = ratio >= self.limit if self.at_least else ratio <= self.limit
        cells["measured"] = f"{value:.4g} {self.unit}".rstrip()
        cells["ratio"] = f"{ratio:.3f}" if self.peer else f"{ratio / self.limit:.2f} of the limit"
        return cells | {"verdict": "ok" if met else "short"}


def judge(targets: Sequence[Target], figures: dict[str, float], report: Report) -> None:
    """Print the targets with their verdicts, and keep them."""
    rows = [target.judge(figures) for target in targets]
    say()
    table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    report.put("targets", rows)
