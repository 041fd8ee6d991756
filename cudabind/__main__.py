"""`python -m cudabind list [--json]`: what is installed, where, in which version, and what is missing.

Once installed, `cudabind list` does the same. It is meant for people who wonder why a call fails, and for scripts: the
exit status is 1 if a library is installed but cannot be used, and 0 otherwise, also if none is installed. It opens
every library that it can find and looks up all its functions; it calls only those that return the version, and creates
no CUDA context.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

from cudabind import LIBRARIES, Library, __version__, _bind, _compat, _load
from cudabind._command import Parser, ended, program
from cudabind._lazy import Module
from cudabind._progress import Progress, tell_pipes
from cudabind._terminal import folded, paged, paint, row_lines, show_whole_lines, width
from cudabind.errors import CudaError, LibraryNotFound

COLUMNS = ("library", "version", "functions", "resolved", "missing", "path")
SPARE = ("resolved", "functions", "missing")  # omitted in this order if the terminal is too narrow
SHOWN = 8  # names of missing functions in the table; --json has all


def describe(row: Library) -> dict[str, Any]:
    """The state of one library as plain data.

    The keys are library, area, module, path, found_by, version, functions, resolved (counts), missing (names), install
    (what to install if it is absent), problem (why it cannot be used) and note.
    """
    state: dict[str, Any] = {"library": row.name, "area": row.area, "module": row.module, "path": None}
    state |= {"found_by": None, "version": None}
    state |= {"functions": 0, "resolved": 0, "missing": [], "install": "", "problem": "", "note": ""}
    module = importlib.import_module(row.module)
    if hasattr(module, "note"):
        state["note"] = module.note()
    try:
        dll = _load.open(row.name)
        symbols = module.symbols() if hasattr(module, "symbols") else _bind.symbols(module)
    except CudaError as error:
        absent = isinstance(error, LibraryNotFound)
        return state | {"problem": str(error), "install": _load.install(row.name) if absent else ""}
    if isinstance(names := getattr(module, "_names", None), Module):  # an older library may use other symbols
        symbols = {name: names.symbol(name) for name in symbols}
    missing = [name for name, symbol in symbols.items() if not hasattr(dll, symbol)]
    state |= {"path": _load.path(row.name), "found_by": _load.found_by(row.name), "version": _load.version(row.name)}
    return state | {"functions": len(symbols), "resolved": len(symbols) - len(missing), "missing": missing}


def unusable(found: dict[str, Any]) -> bool:
    """Whether a library is installed but cannot be used; absence counts only if an override names the library."""
    return bool(found["problem"]) and (
        not found["install"] or _compat.variable(LIBRARIES[found["library"]]) in os.environ
    )


def _print_table(found: list[dict[str, Any]]) -> None:
    lines = [COLUMNS]
    for row in found:
        where = row["path"] or ("see below" if unusable(row) else f"install: {row['install']}")
        version = row["version"] or ("unusable" if unusable(row) else "not found")
        counts = (str(row["functions"]), str(row["resolved"]), str(len(row["missing"])))
        lines.append((row["library"], version, *counts, where))
    (titles, *shown), out = row_lines(lines, width(), SPARE)
    for line in titles:
        sys.stdout.write(f"{paint(line, 'bold')}\n")
    area = ""
    for row, of_row in zip(found, shown, strict=True):
        if row["area"] != area:
            area = row["area"]
            sys.stdout.write(f"{paint(f'# {area}', 'dim')}\n")
        for line in of_row:
            sys.stdout.write(f"{line}\n")
    if out:
        _say(f"{len(out)} columns are left out here: {', '.join(out)}; --wide shows all", "dim")
    for row in found:
        if row["missing"]:
            more = f" and {len(row['missing']) - SHOWN} more, see --json" if len(row["missing"]) > SHOWN else ""
            _say(f"{row['library']} does not export: {', '.join(row['missing'][:SHOWN])}{more}")
        if row["note"]:
            _say(f"{row['library']}: {row['note']}")
        if unusable(row):
            _say(row["problem"], "red")


def _say(text: str, style: str = "") -> None:
    for line in folded(text, width(), 2):
        sys.stdout.write(f"{paint(line, style)}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return ended(program("cudabind"), lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    parser = Parser(prog=program("cudabind"), description="NVIDIA's libraries as this program sees them.")
    parser.add_argument("--version", action="version", version=f"cudabind {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="every library: version, functions, path, or what to install")
    listing.add_argument("--json", action="store_true", help="print a list of objects")
    listing.add_argument("--wide", action="store_true", help="show all columns on a terminal, without wrapping lines")
    options = parser.parse_args(arguments)
    show_whole_lines(options.wide)
    tell_pipes()
    states = []
    with Progress("open libraries", len(LIBRARIES), ticking=True) as bar:
        for row in LIBRARIES.values():
            states.append(describe(row))
            bar.update()
    tell_pipes(False)
    if options.json:
        sys.stdout.write(json.dumps(states, indent=2) + "\n")
    else:
        with paged():
            _print_table(states)
    return 1 if any(unusable(row) for row in states) else 0


if __name__ == "__main__":
    sys.exit(main())
