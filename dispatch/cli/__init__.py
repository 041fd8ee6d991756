"""The commands of `python -m dispatch`, one file each with `add_arguments(parser)` and `run(options) -> exit status`.

`__main__` imports the one that is asked for. Facts go to stdout, as text or with `--json`; what went wrong goes to
stderr. Nothing here is imported by the library itself.
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
    """Text as a terminal may show it: what would move its cursor, hide a line or do more is spelled out.

    Names and messages come out of files and from other processes, too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", style: str = "", hang: int = 0) -> None:
    """Print one line of facts; a terminal folds it, and all but its first line begin `hang` columns in."""
    for line in folded(printable(text), width(), hang):
        sys.stdout.write(f"{paint(line, style)}\n")


def complain(text: str) -> None:
    """Print what went wrong; a terminal folds it."""
    for line in folded(printable(text), width(sys.stderr), 2):
        sys.stderr.write(f"{line}\n")


def print_aligned(
    lines: Iterable[Sequence[str]], indent: str = "", *, head: bool = False, spare: Sequence[str] = ()
) -> None:
    """Print cells in columns as wide as their widest; the last is as wide as it is.

    On a terminal that is too narrow the `spare` columns are left out, which is said below, and others are folded. With
    `head` the first line has their titles.
    """
    rows = [tuple(printable(cell, keep="") for cell in line) for line in lines]
    room = width()
    shown, out = columns(rows, None if room is None else room - len(indent), spare)
    for number, line in enumerate(shown):
        sys.stdout.write(f"{indent}{paint(line, 'bold') if head and not number else line}\n")
    if out:
        several = "columns are" if len(out) > 1 else "column is"
        say(f"{len(out)} {several} left out here: {', '.join(out)}; --wide shows all", "dim")


def print_json(facts: Any) -> None:
    """Print facts for programs."""
    sys.stdout.write(f"{json.dumps(facts, indent=2)}\n")  # in ASCII, which no terminal takes for anything else
