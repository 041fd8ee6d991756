"""`python -m cudabind list [--json]`: what is installed, where, in which version, and what is missing.

Run by people who wonder why a call fails, and by checks. It opens every library that it can find and looks up every
function of it; it calls none of them but those that tell the version.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from typing import Any

from cudabind import LIBRARIES, Library, _bind, _load
from cudabind.errors import CudaError

COLUMNS = ("library", "version", "functions", "resolved", "missing", "path")


def describe(row: Library) -> dict[str, Any]:
    """One library as plain data: library, module, path, version, functions, resolved, missing, install, problem."""
    found: dict[str, Any] = {"library": row.name, "module": row.module, "path": None, "version": None}
    found |= {"functions": 0, "resolved": 0, "missing": [], "install": row.install, "problem": ""}
    try:
        dll = _load.open(row.name)
        module = importlib.import_module(row.module)
    except (CudaError, ModuleNotFoundError) as error:
        return found | {"problem": str(error)}
    symbols = module.symbols() if hasattr(module, "symbols") else _bind.symbols(module)
    missing = [name for name, symbol in symbols.items() if not hasattr(dll, symbol)]
    found |= {"path": _load.path(row.name), "version": _load.version(row.name), "install": ""}
    return found | {"functions": len(symbols), "resolved": len(symbols) - len(missing), "missing": missing}


def _print_table(found: list[dict[str, Any]]) -> None:
    lines = [COLUMNS]
    for row in found:
        cells = [row["library"], row["version"] or "not found", str(row["functions"]), str(row["resolved"])]
        lines.append((*cells, str(len(row["missing"])), row["path"] or f"install: {row['install']}"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    for line in lines:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")
    for row in found:
        if row["missing"]:
            sys.stdout.write(f"{row['library']} does not export: {', '.join(row['missing'])}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cudabind", description="NVIDIA's libraries as this program sees them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="every library: version, functions, path, or what to install")
    listing.add_argument("--json", action="store_true", help="print a list of objects")
    options = parser.parse_args(arguments)
    found = [describe(row) for row in LIBRARIES.values()]
    if options.json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        _print_table(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
