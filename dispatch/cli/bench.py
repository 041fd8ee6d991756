"""`python -m dispatch bench`: runs the measurements of tests/benchmarks, which a repository checkout has.

Each `bench_*.py` there has `main(device, quick, json_path)`, prints its own table and may write its figures as JSON;
this module finds them, runs them one after the other, and puts the figures into one file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import dispatch
from dispatch.cli import say

if TYPE_CHECKING:
    import argparse
    from types import ModuleType

__all__ = ["add_arguments", "run", "scripts"]

PREFIX = "bench_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench`."""
    names = ", ".join(scripts()) or "none here: they come with the repository"
    parser.add_argument("--device", default="auto", help="cuda:0, host, or auto (default): the GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="few repeats: whether it runs, not how fast")
    parser.add_argument("--only", action="append", metavar="NAME", help=f"only this one, may be repeated: {names}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all of them to this file")


def scripts() -> dict[str, Path]:
    """The benchmarks of this checkout by name; none where only the package is installed."""
    folder = Path(dispatch.__file__).resolve().parents[1] / "tests" / "benchmarks"
    return {path.stem.removeprefix(PREFIX): path for path in sorted(folder.glob(f"{PREFIX}*.py"))}


def run(options: argparse.Namespace) -> int:
    """Run the benchmarks asked for; 1 where one fails or there is none."""
    found = scripts()
    if not found:
        sys.stderr.write("no benchmarks here: they are in tests/benchmarks of the repository, not in the package\n")
        return 1
    wanted = [name.removeprefix(PREFIX) for name in options.only or found]
    unknown = [name for name in wanted if name not in found]
    if unknown:
        sys.stderr.write(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(found)}\n")
        return 1
    device = dispatch.device().name if options.device == "auto" else options.device
    figures: dict[str, object] = {}
    failed = [name for name in wanted if not _run(name, found[name], device, options.quick, figures)]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if failed:
        sys.stderr.write(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _run(name: str, path: Path, device: str, quick: bool, figures: dict[str, object]) -> bool:
    """Run one benchmark and collect its figures; one that fails does not keep the others from running."""
    say(f"== {name} on {device}{' (quick)' if quick else ''}")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        try:
            _load(path).main(device, quick, str(target))
        except Exception:  # noqa: BLE001 - whatever goes wrong in a script is shown, and the next one still runs
            traceback.print_exc()
            return False
        if target.exists():
            figures[name] = json.loads(target.read_text(encoding="utf-8"))
    return True


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look a module up by its name
    # Benchmarks share files of their folder, as scripts do.
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
