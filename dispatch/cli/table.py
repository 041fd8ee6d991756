"""`python -m dispatch table`: the rows of the table, aligned for people or as JSON for programs.

`describe` is also what `explain` says of the row it found. Reads the table, rows of installed packages included; calls
no library.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from dispatch.cli import print_aligned, print_json, say
from dispatch.keys import Arch
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.row import Row, Rule
    from dispatch.keys import Epilogue

__all__ = ["add_arguments", "architecture", "describe", "rule_text", "run", "version_text"]

HEAD = ("op", "dtypes", "compute", "epilogues", "scales of a, b", "arch", "library function", "since", "run on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `table`."""
    parser.add_argument("--op", help=f"only the rows of this op: {', '.join(TABLE.ops)}")
    parser.add_argument("--arch", type=architecture, help="only rows that run on it: sm_90, or host")
    parser.add_argument("--json", action="store_true", help="print a list of objects")


def architecture(text: str) -> Arch:
    """An architecture from the command line."""
    try:
        return Arch.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Print the rows asked for; 1 where there is none."""
    if options.op is not None and options.op not in TABLE.ops:
        sys.stderr.write(f"the table has no op {options.op!r}; it has {', '.join(TABLE.ops)}\n")
        return 1
    rows = [row for row in TABLE if options.op in (None, row.op) and (options.arch is None or row.on(options.arch))]
    if options.json:
        print_json([describe(row) for row in rows])
    elif rows:
        _print(rows)
    if not rows:
        sys.stderr.write(f"no row of the table is for {options.arch}\n")
    return 0 if rows else 1


def describe(row: Row) -> dict[str, Any]:
    """A row as plain data: `min_version` and `until` None for no limit, `run_on` None where no machine has run it."""
    return {
        "name": row.name,
        "op": row.op,
        "variant": row.variant or None,
        "dtypes": [dtype.name for dtype in row.dtypes],
        "extra_dtypes": [[dtype.name for dtype in allowed] for allowed in row.extra],
        "compute": row.compute.name if row.compute is not None else None,
        "epilogues": [epilogue.name for epilogue in row.epilogues],
        "scales": [[mode.name if mode is not None else None for mode in pair] for pair in row.scales],
        "rules": [rule_text(rule) for rule in row.rules],
        "arch": str(row.arch),
        "until": str(row.until) if row.until is not None else None,
        "library": row.library,
        "function": row.function,
        "min_version": version_text(row.since) or None,
        "run_on": list(row.run_on) or None,
        "note": row.note or None,
        "nonfinite": row.nonfinite or None,
    }


def rule_text(rule: Rule) -> str:
    """What a rule asks for: the first line of its docstring, or its name."""
    return (rule.__doc__ or str(getattr(rule, "__name__", rule))).strip().splitlines()[0]


def version_text(version: tuple[int, ...]) -> str:
    """(12, 9) as "12.9"."""
    return ".".join(map(str, version))


def _print(rows: list[Row]) -> None:
    sets = list(dict.fromkeys(row.epilogues for row in rows if len(row.epilogues) > 1))
    labels = {epilogues: f"{len(epilogues)} [{number}]" for number, epilogues in enumerate(sets, 1)}
    print_aligned([HEAD, *(_cells(row, labels) for row in rows)])
    say(f"\n{len(rows)} rows, in order of priority. Epilogues:")
    for epilogues, label in labels.items():
        say(f"  {label.partition(' ')[2]} {' '.join(epilogue.name for epilogue in epilogues)}")
    said = dict.fromkeys((row.op, row.nonfinite) for row in rows if row.nonfinite)
    if said:
        say("NaN and infinities:")
        print_aligned(list(said), indent="  ")
    noted = [row for row in rows if row.note]
    if noted:
        say("Notes:")
        print_aligned([(row.name, row.note) for row in noted], indent="  ")


def _cells(row: Row, labels: dict[tuple[Epilogue, ...], str]) -> tuple[str, ...]:
    span = (
        str(row.arch) if row.until == row.arch else f"{row.arch}+" if row.until is None else f"{row.arch}-{row.until}"
    )
    modes = [
        "none" if pair == (None, None) else ",".join(m.name if m is not None else "none" for m in pair)
        for pair in row.scales
    ]
    return (
        f"{row.op} {row.variant}".strip(),
        " ".join(dtype.name for dtype in row.dtypes),
        row.compute.name.removeprefix("COMPUTE_") if row.compute is not None else "-",
        labels.get(row.epilogues, row.epilogues[0].name),
        modes[0] if len(modes) == 1 else f"{modes[0]}, or {modes[-1]}",
        span,
        f"{row.library}.{row.function}",
        version_text(row.since) or "-",
        ", ".join(row.run_on) or "none yet",
    )
