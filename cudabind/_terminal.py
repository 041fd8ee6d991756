"""What the command lines know of a terminal: how wide it is, whether it shows colours, and a pager for long output.

Where output goes to a file or another program it is whole: no colour, no folded line, no pager.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["coloured", "columns", "elided", "folded", "paged", "paint", "row_lines", "show_whole_lines", "width"]

STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
NARROWEST = 10  # columns of a table that is folded
GAP = 2  # between columns
_whole = False


def show_whole_lines(on: bool = True) -> None:
    """Fold nothing, however narrow the terminal is (`--wide`), or again what does not fit."""
    global _whole
    _whole = on


def width(stream: Any = None) -> int | None:
    """How many columns a stream (stdout) has, or None where its lines may have any length."""
    if _whole or not _is_terminal(sys.stdout if stream is None else stream):
        return None
    return max(shutil.get_terminal_size().columns, 2 * NARROWEST)


def coloured(stream: Any) -> bool:
    """Whether a stream shows colours: a terminal does, unless NO_COLOR or TERM=dumb say otherwise; FORCE_COLOR does."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and _is_terminal(stream)


def paint(text: str, style: str, stream: Any = None) -> str:
    """Text in a style of STYLES, where the stream (stdout) shows it; without style as it is."""
    if not style or not text or not coloured(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def folded(text: str, room: int | None, hang: int = 0) -> list[str]:
    """The lines of a text, broken between words; those after the first begin `hang` columns in.

    A word that is longer than a line, such as a path, stays whole.
    """
    if room is None or len(text) <= room:
        return [text]
    return textwrap.wrap(text, room, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]


def elided(word: str, room: int) -> str:
    """A word of at most `room` characters: what is in the middle gives way, because a path's end says most."""
    if len(word) <= room:
        return word
    begin = (room - 1) // 3
    return f"{word[:begin]}…{word[len(word) - (room - 1 - begin) :]}"


def columns(rows: Sequence[Sequence[str]], room: int | None, spare: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """As `row_lines`, in one list."""
    lines, out = row_lines(rows, room, spare)
    return [line for row in lines for line in row], out


def row_lines(
    rows: Sequence[Sequence[str]], room: int | None, spare: Sequence[str] = ()
) -> tuple[list[list[str]], list[str]]:
    """Cells in columns as wide as their widest, as lines of each row; and the titles of the columns that are left out.

    Where that does not fit, the `spare` columns go, by their titles in the first row, as many as must; then cells are
    folded between their words, in columns where few are long.
    """
    kept = list(range(len(rows[0]))) if rows else []
    widths = [max(len(row[number]) for row in rows) for number in kept]
    out: list[str] = []
    for title in spare:
        if room is None or sum(widths[number] + GAP for number in kept) - GAP <= room:
            break
        if title in rows[0]:
            kept.remove(rows[0].index(title))
            out.append(title)
    taken = {number: widths[number] for number in kept}
    while room is not None and sum(taken.values()) + GAP * (len(taken) - 1) > room:
        foldable = [number for number in kept if taken[number] > NARROWEST]
        if not foldable:
            break
        taken[min(foldable, key=lambda number: _loss([row[number] for row in rows], taken[number]))] -= 1
    lines: list[list[str]] = []
    for row in rows:
        cells = [_cell(row[number], taken[number]) for number in kept]
        lines.append([])
        for place in range(max(map(len, cells), default=0)):
            parts = [cell[place] if place < len(cell) else "" for cell in cells]
            padded = (part.ljust(size) for part, size in zip(parts, taken.values(), strict=True))
            lines[-1].append((" " * GAP).join(padded).rstrip())
    return lines, sorted(out, key=list(rows[0]).index) if out else []


def _loss(cells: Sequence[str], size: int) -> tuple[bool, int, int]:
    """What it costs to make a column narrower by one: words that are cut, else cells that are folded."""
    long = [cell for cell in cells if len(cell) >= size]
    return any(len(word) >= size for cell in long for word in cell.split(" ")), len(long), -size


def _cell(text: str, room: int) -> list[str]:
    """The lines of a cell."""
    if len(text) <= room:
        return [text]
    return folded(" ".join(elided(word, room) for word in text.split(" ")), room)


class _Kept(io.StringIO):
    """Output that is kept until its length is known; to who writes it is the terminal that will show it."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """Show what is printed within through the user's pager, where a terminal shows it and is too small for it."""
    command = _pager()
    if command is None:
        yield
        return
    kept = _Kept()
    try:
        with contextlib.redirect_stdout(kept):
            yield
    except KeyboardInterrupt:  # who wants no more of it wants no pager either
        raise
    except BaseException:
        _show(kept.getvalue(), command)
        raise
    _show(kept.getvalue(), command)


def _show(text: str, command: list[str]) -> None:
    size = shutil.get_terminal_size()
    lines = sum(max(1, -(-len(line) // size.columns)) for line in text.splitlines())
    if lines < size.lines:
        sys.stdout.write(text)
        return
    environment = {"LESS": "FRSX" if _whole else "FRX", "LV": "-c"} | os.environ
    try:
        pager = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
    except OSError:
        sys.stdout.write(text)
        return
    # Ctrl-C belongs to the pager, which ends when its user says so.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        pager.communicate(text.encode())
    while pager.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):
            pager.wait()


def _pager() -> list[str] | None:
    """The command of PAGER, or less; None where there is none, or nobody who could turn pages."""
    if not _is_terminal(sys.stdout) or not _is_terminal(sys.stdin) or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        command = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    return command if command and command != ["cat"] and shutil.which(command[0]) else None


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; one that is closed, or not there, is none."""
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:
        return False
