"""`python -m dispatch bench`: runs the measurements of tests/benchmarks, which a repository checkout has.

Each `bench_*.py` there is a program that takes --device, --quick and --json FILE, prints its own tables and writes its
figures as JSON; this module finds these programs, runs them one after the other, and writes all figures to one file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dispatch
from cudabind._command import INTERRUPTED
from cudabind._progress import duration
from dispatch.cli import complain, say

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run", "scripts"]

PREFIX = "bench_"
ON_HOST = (
    "On the host each benchmark runs a few small cases in NumPy. This shows whether it runs and how long Python itself"
    " takes, but not how fast kernels are. There are no verdicts; a benchmark that needs a GPU says so and"
    " measures nothing."
)
WITHOUT_GPU = f"No working GPU was found (`python -m dispatch doctor` says why). {ON_HOST}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    names = ", ".join(scripts()) or "none installed: they come with the repository"
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="few repeats: tests whether it runs, not how fast")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help=f"run only this benchmark; may be repeated: {names}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")


def scripts() -> dict[str, Path]:
    """The benchmarks of this checkout by name; none if only the package is installed."""
    folder = Path(dispatch.__file__).resolve().parents[1] / "tests" / "benchmarks"
    return {path.stem.removeprefix(PREFIX): path for path in sorted(folder.glob(f"{PREFIX}*.py"))}


def run(options: argparse.Namespace) -> int:
    """Run the selected benchmarks; returns 1 if one fails or if there are none."""
    available = scripts()
    if not available:
        complain("no benchmarks are installed: they are in tests/benchmarks of the repository, not in the package")
        return 1
    selected = [name.removeprefix(PREFIX) for name in options.only or available]
    unknown = [name for name in selected if name not in available]
    if unknown:
        complain(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(available)}")
        return 1
    device = dispatch.device(None if options.device == "auto" else options.device)
    if device.is_host:
        say(WITHOUT_GPU if options.device == "auto" else ON_HOST, "yellow", 2)
    figures: dict[str, object] = {}
    failed: list[str] = []
    begun = time.monotonic()
    for number, name in enumerate(selected):
        progress = _progress_text(number, len(selected), begun)
        say(
            f"== {name} on {device.name}{' (quick)' if options.quick else ''}{progress}",
            "bold",
        )
        if not _run(available[name], device.name, options.quick, figures):
            failed.append(name)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if failed:
        complain(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _progress_text(number: int, total: int, begun: float) -> str:
    """The number of the benchmark, the total, and the estimated remaining time."""
    if total == 1:
        return ""
    seconds = time.monotonic() - begun
    times = (
        f", {duration(seconds)} so far, about {duration(seconds / number * (total - number))} left" if number else ""
    )
    return f", {number + 1} of {total}{times}"


def _run(path: Path, device: str, quick: bool, figures: dict[str, object]) -> bool:
    """Run one benchmark and collect its figures; the others also run if it fails."""
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        command = [sys.executable, str(path), "--device", device, "--json", str(target)]
        root = str(Path(dispatch.__file__).resolve().parents[1])
        module_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        command += ["--quick"] if quick else []
        done = subprocess.run(command, check=False, env=os.environ | {"PYTHONPATH": module_path})
        if done.returncode in (INTERRUPTED, -2):
            raise KeyboardInterrupt
        if target.exists():
            figures[path.stem.removeprefix(PREFIX)] = json.loads(target.read_text(encoding="utf-8"))
    return done.returncode == 0
