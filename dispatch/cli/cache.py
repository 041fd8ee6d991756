"""`python -m dispatch cache [list | clear | path]`: what autotune has found and keeps on disk.

The files are written and read by `tuning.py`; this room looks at them as a person would, and deletes those files and
nothing else in the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispatch.cli import print_aligned, print_json, say
from dispatch.tuning import cache_folder

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "entries", "run"]

PATTERN = "autotune-*.json*"  # with what a process that was killed while writing left behind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cache`."""
    actions = ("list", "clear", "path")
    parser.add_argument("action", nargs="?", choices=actions, default="list", help="what to do (default: list)")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(options: argparse.Namespace) -> int:
    """List or delete the files, or tell the folder."""
    folder = cache_folder()
    found = entries(folder)
    removed = [_remove(Path(entry["path"])) for entry in found] if options.action == "clear" else []
    if options.json:
        print_json({"folder": str(folder), "files": found, "removed": sum(removed)})
    elif options.action == "path":
        say(str(folder))
    elif options.action == "clear":
        say(f"removed {sum(removed)} files from {folder}")
    elif found:
        lines = [(e["gpu"] or "?", e["library"] or "?", str(e["algorithms"]), e["state"], e["path"]) for e in found]
        print_aligned([("gpu", "library", "algorithms", "state", "file"), *lines])
    else:
        say(f"{folder} holds nothing yet; requests with autotune=True fill it")
    return 0


def entries(folder: Path) -> list[dict[str, Any]]:
    """The autotune files of a folder: path, bytes, GPU, library, how many algorithms, and whether it can be read."""
    return [_entry(path) for path in sorted(folder.glob(PATTERN)) if path.is_file()]


def _entry(path: Path) -> dict[str, Any]:
    entry: dict[str, Any] = {"path": str(path), "bytes": path.stat().st_size, "gpu": None, "library": None}
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        stamp, algorithms = stored["stamp"], stored["algorithms"]
        return entry | {
            "gpu": stamp["gpu"],
            "library": stamp["library"],
            "algorithms": len(algorithms),
            "state": "good",
        }
    except (OSError, ValueError, KeyError, TypeError):
        return entry | {"algorithms": 0, "state": "damaged: ignored, and rebuilt by the next autotune"}


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:  # another process was faster
        return False
    return True
