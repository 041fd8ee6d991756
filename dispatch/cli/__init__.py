"""The commands of `python -m dispatch`, one file each with `add_arguments(parser)` and `run(options) -> exit status`.

`__main__` imports only the command that is run. Results go to stdout, as text or as JSON with `--json`; errors go to
stderr. The library itself imports nothing from here.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from cudabind._terminal import columns, folded, paint, width

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["complain", "print_aligned", "print_json", "printable", "say"]


def printable(text: str, keep: str = "\n\t") -> str:
    """Text that is safe to print: characters that might move a terminal's cursor or hide a line are escaped.

    Names and messages may come from files and other processes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", style: str = "", hang: int = 0) -> None:
    """Print one line to stdout; on a terminal it is folded, and continuation lines are indented by `hang` columns."""
    for line in folded(printable(text), width(), hang):
        sys.stdout.write(f"{paint(line, style)}\n")


def complain(text: str) -> None:
    """Print an error to stderr; on a terminal it is folded."""
    for line in folded(printable(text), width(sys.stderr), 2):
        sys.stderr.write(f"{line}\n")


def print_aligned(
    lines: Iterable[Sequence[str]], indent: str = "", *, head: bool = False, spare: Sequence[str] = ()
) -> None:
    """Print cells in columns that are as wide as their widest cell; the last column is not padded.

    On a terminal that is too narrow the `spare` columns are left out, with a note below, and others are folded. With
    `head` the first line has the titles.
    """
    rows = [tuple(printable(cell, keep="") for cell in line) for line in lines]
    columns_available = width()
    shown, out = columns(rows, None if columns_available is None else columns_available - len(indent), spare)
    for number, line in enumerate(shown):
        sys.stdout.write(f"{indent}{paint(line, 'bold') if head and not number else line}\n")
    if out:
        several = "columns are" if len(out) > 1 else "column is"
        say(f"{len(out)} {several} left out here: {', '.join(out)}; --wide shows all", "dim")


def print_json(facts: Any) -> None:
    """Print results for programs, as JSON."""
    sys.stdout.write(f"{json.dumps(facts, indent=2)}\n")  # in ASCII, so that no control characters reach a terminal
