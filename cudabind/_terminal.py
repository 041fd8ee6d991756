"""Terminal output of the command lines: width, colours, tables, and a pager for long output.

Output to a file or another program has no colours, no folded lines and no pager.
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
NARROWEST = 10  # characters; columns of a table are not folded below this
GAP = 2  # between columns
_whole = False


def show_whole_lines(on: bool = True) -> None:
    """Set whether lines stay whole however narrow the terminal is (`--wide`)."""
    global _whole
    _whole = on


def width(stream: Any = None) -> int | None:
    """The columns of a stream (by default stdout), or None if its lines may have any length."""
    if _whole or not _is_terminal(sys.stdout if stream is None else stream):
        return None
    return max(shutil.get_terminal_size().columns, 2 * NARROWEST)


def coloured(stream: Any) -> bool:
    """Whether to colour output on a stream: on terminals, unless NO_COLOR or TERM=dumb is set; or by FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and _is_terminal(stream)


def paint(text: str, style: str, stream: Any = None) -> str:
    """Text in a style of STYLES, if the stream (by default stdout) shows colours; unchanged without a style."""
    if not style or not text or not coloured(sys.stdout if stream is None else stream):
        return text
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def folded(text: str, room: int | None, hang: int = 0) -> list[str]:
    """The lines of a text, broken between words; all after the first are indented by `hang`.

    A word that is longer than a line, such as a path, is not broken.
    """
    if room is None or len(text) <= room:
        return [text]
    return textwrap.wrap(text, room, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False) or [
        ""
    ]


def elided(word: str, room: int) -> str:
    """A word shortened to at most `room` characters by eliding its middle, as the end of a path matters most."""
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
    """A table as lines for each row, with columns as wide as their widest cells; and the titles of omitted columns.

    If that does not fit, as many of the `spare` columns as necessary are omitted, by their titles in the first row;
    then cells are folded between words, in columns that have few long cells.
    """
    shown = list(range(len(rows[0]))) if rows else []
    widths = [max(len(row[number]) for row in rows) for number in shown]
    out: list[str] = []
    for title in spare:
        if room is None or sum(widths[number] + GAP for number in shown) - GAP <= room:
            break
        if title in rows[0]:
            shown.remove(rows[0].index(title))
            out.append(title)
    size_of = {number: widths[number] for number in shown}
    while room is not None and sum(size_of.values()) + GAP * (len(size_of) - 1) > room:
        foldable = [number for number in shown if size_of[number] > NARROWEST]
        if not foldable:
            break
        size_of[min(foldable, key=lambda number: _loss([row[number] for row in rows], size_of[number]))] -= 1
    lines: list[list[str]] = []
    for row in rows:
        cells = [_cell(row[number], size_of[number]) for number in shown]
        lines.append([])
        for place in range(max(map(len, cells), default=0)):
            parts = [cell[place] if place < len(cell) else "" for cell in cells]
            padded = (part.ljust(size) for part, size in zip(parts, size_of.values(), strict=True))
            lines[-1].append((" " * GAP).join(padded).rstrip())
    return lines, sorted(out, key=list(rows[0]).index) if out else []


def _loss(cells: Sequence[str], size: int) -> tuple[bool, int, int]:
    """The cost of making a column narrower by one: whether words are cut, and how many cells are folded."""
    long = [cell for cell in cells if len(cell) >= size]
    return any(len(word) >= size for cell in long for word in cell.split(" ")), len(long), -size


def _cell(text: str, room: int) -> list[str]:
    """The lines of a cell."""
    if len(text) <= room:
        return [text]
    return folded(" ".join(elided(word, room) for word in text.split(" ")), room)


class _Kept(io.StringIO):
    """A buffer for output until its length is known; it counts as a terminal, because one will show it."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """A block whose output is shown by the user's pager, if stdout is a terminal that is too small for it."""
    command = _pager()
    if command is None:
        yield
        return
    buffer = _Kept()
    try:
        with contextlib.redirect_stdout(buffer):
            yield
    except KeyboardInterrupt:  # show nothing
        raise
    except BaseException:
        _show(buffer.getvalue(), command)
        raise
    _show(buffer.getvalue(), command)


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
    # The pager handles Ctrl-C.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        pager.communicate(text.encode())
    while pager.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):
            pager.wait()


def _pager() -> list[str] | None:
    """The command of PAGER, or less; None if there is none, or no terminal on stdin and stdout."""
    if not _is_terminal(sys.stdout) or not _is_terminal(sys.stdin) or os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        command = shlex.split(os.environ.get("PAGER", "less"))
    except ValueError:
        return None
    return command if command and command != ["cat"] and shutil.which(command[0]) else None


def _is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False if it is closed or None."""
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:
        return False
