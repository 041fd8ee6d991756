"""The commands of `python -m dispatch`, one file each with `add_arguments(parser)` and `run(options) -> exit status`.

`__main__` imports the one that is asked for. Facts go to stdout, as text or with `--json`; what went wrong goes to
stderr. Nothing here is imported by the library itself.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["complain", "plain", "print_aligned", "print_json", "say"]


def plain(text: str, keep: str = "\n\t") -> str:
    """Text as a terminal may show it: what would move its cursor, hide a line or do more is spelled out.

    Names and messages come out of files and from other processes, too.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "") -> None:
    """Print one line of facts."""
    sys.stdout.write(f"{plain(text)}\n")


def complain(text: str) -> None:
    """Print what went wrong."""
    sys.stderr.write(f"{plain(text)}\n")


def print_aligned(lines: Iterable[Sequence[str]], indent: str = "") -> None:
    """Print cells in columns as wide as their widest; the last is as wide as it is."""
    rows = [tuple(plain(cell, keep="") for cell in line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say(f"{indent}{'  '.join(cells)}".rstrip())


def print_json(facts: Any) -> None:
    """Print facts for programs."""
    sys.stdout.write(f"{json.dumps(facts, indent=2)}\n")  # in ASCII, which no terminal takes for anything else
