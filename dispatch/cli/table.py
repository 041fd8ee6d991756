"""`python -m dispatch table`: the rows of the table, aligned for people or as JSON for programs.

`explain` also uses `describe` for the row that takes the request. This module reads the table, including rows of
installed packages, and calls no library.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cudabind._terminal import columns, width
from dispatch.cli import complain, print_aligned, print_json, say
from dispatch.core.fusion import NOTHING
from dispatch.keys import Arch
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.fusion import Fusion
    from dispatch.core.row import Row, Rule
    from dispatch.keys import Epilogue

__all__ = ["add_arguments", "architecture", "describe", "rule_text", "run", "version_text"]

HEAD = (
    *("op", "dtypes", "compute", "epilogue dtypes", "epilogues", "scales of a, b"),
    *("arch", "library function", "min version", "run on"),
)

# On a narrow terminal these columns are left out in this order, until the others fit.
SPARE = ("scales of a, b", "epilogue dtypes", "min version", "library function", "run on", "epilogues")


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
    """Print the selected rows; returns 1 if there are none, 2 for an unknown op."""
    if options.op is not None and options.op not in TABLE.ops:
        complain(
            f"the table has no op {options.op!r}; its ops are {', '.join(TABLE.ops)}; --import MODULE adds your own"
        )
        return 2
    rows = [row for row in TABLE if options.op in (None, row.op) and (options.arch is None or row.on(options.arch))]
    if options.json:
        print_json([describe(row) for row in rows])
    elif rows:
        _print(rows)
    if not rows:
        complain(f"no row of the table runs on {options.arch}")
    return 0 if rows else 1


def describe(row: Row) -> dict[str, Any]:
    """A row as plain data: `min_version` and `max_arch` None for no limit, `run_on` None if no machine has run it.

    The fused operations are included only if the row has any.
    """
    return {
        "name": row.name,
        "op": row.op,
        "variant": row.variant or None,
        "dtypes": [dtype.name for dtype in row.dtypes],
        "compute": row.compute.name if row.compute is not None else None,
        "rules": [rule_text(rule) for rule in row.rules],
        **_fused(row.fusion),
        "min_arch": str(row.min_arch),
        "max_arch": str(row.max_arch) if row.max_arch is not None else None,
        "library": row.library,
        "function": row.function,
        "min_version": version_text(row.min_version) or None,
        "run_on": list(row.run_on) or None,
        "note": row.note or None,
        "nonfinite": row.nonfinite or None,
    }


def _fused(fusion: Fusion | None) -> dict[str, Any]:
    """The choices of a fusion that differ from no fusion."""
    choices: dict[str, Any] = {}
    if fusion is not None and fusion.epilogue_dtypes:
        choices["epilogue_dtypes"] = [[dtype.name for dtype in allowed] for allowed in fusion.epilogue_dtypes]
    if fusion is not None and fusion.epilogues != NOTHING.epilogues:
        choices["epilogues"] = [epilogue.name for epilogue in fusion.epilogues]
    if fusion is not None and fusion.scales != NOTHING.scales:
        choices["scales"] = [[mode.name if mode is not None else None for mode in pair] for pair in fusion.scales]
    return choices


def rule_text(rule: Rule) -> str:
    """The requirement of a rule: the first line of its docstring, or its name."""
    return (rule.__doc__ or str(getattr(rule, "__name__", rule))).strip().splitlines()[0]


def version_text(version: tuple[int, ...]) -> str:
    """(12, 9) as "12.9"."""
    return ".".join(map(str, version))


def _print(rows: list[Row]) -> None:
    sets = list(dict.fromkeys(row.epilogues for row in rows if len(row.epilogues) > 1))
    labels = {epilogues: f"{len(epilogues)} [{number}]" for number, epilogues in enumerate(sets, 1)}
    lines = [_cells(row, labels) for row in rows]
    shown = [name for name in HEAD if any(name in line for line in lines)]
    cells = [shown, *([line.get(name, "-") for name in shown] for line in lines)]
    columns_available = width()
    if columns_available is not None and max(map(len, columns(cells, None)[0])) > columns_available:
        shown = [*shown[: shown.index("library function")], "library", *shown[shown.index("library function") :]]
        cells = [shown, *([_shorter(line).get(name, "-") for name in shown] for line in lines)]
    print_aligned(cells, head=True, spare=SPARE)
    say(f"\n{len(rows)} rows, in order of priority.{' Epilogues:' if labels else ''}")
    for epilogues, label in labels.items():
        say(f"  {label.partition(' ')[2]} {' '.join(epilogue.name for epilogue in epilogues)}", hang=6)
    statements = dict.fromkeys((row.op, row.nonfinite) for row in rows if row.nonfinite)
    if statements:
        say("NaN and infinities:")
        print_aligned(list(statements), indent="  ")
    noted = [row for row in rows if row.note]
    if noted:
        say("Notes:")
        print_aligned([(row.name, row.note) for row in noted], indent="  ")


def _shorter(cells: dict[str, str]) -> dict[str, str]:
    """Cells with only the library's name, which is shorter than the function, and with counts of equal dtypes."""
    runs = [(name, len(list(same))) for name, same in groupby(cells["dtypes"].split())]
    dtypes = " ".join(name if count == 1 else f"{count}×{name}" for name, count in runs)  # noqa: RUF001
    return cells | {"dtypes": dtypes, "library": cells["library function"].partition(".")[0]}


def _cells(row: Row, labels: dict[tuple[Epilogue, ...], str]) -> dict[str, str]:
    """The columns that a row has."""
    oldest, newest = row.min_arch, row.max_arch
    cells = {
        "op": f"{row.op} {row.variant}".strip(),
        "dtypes": " ".join(dtype.name for dtype in row.dtypes),
        "compute": row.compute.name.removeprefix("COMPUTE_") if row.compute is not None else "-",
        "arch": str(oldest) if newest == oldest else f"{oldest}+" if newest is None else f"{oldest}-{newest}",
        "library function": f"{row.library}.{row.function}",
        "min version": version_text(row.min_version) or "-",
        "run on": ", ".join(row.run_on) or "none yet",
    }
    fused = _fused(row.fusion)
    if "epilogue_dtypes" in fused:
        cells["epilogue dtypes"] = ", ".join("|".join(allowed) or "-" for allowed in fused["epilogue_dtypes"])
    if "epilogues" in fused:
        cells["epilogues"] = labels.get(row.epilogues, row.epilogues[0].name)
    if "scales" in fused:
        modes = ["none" if pair == [None, None] else ",".join(m or "none" for m in pair) for pair in fused["scales"]]
        cells["scales of a, b"] = modes[0] if len(modes) == 1 else f"{modes[0]}, or {modes[-1]}"
    return cells
