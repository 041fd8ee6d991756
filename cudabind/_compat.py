"""Checks that libraries belong together: linked libraries, the parts of a library, and libraries of one release.

`_load` calls it while it opens a library, before any function is called. It raises LibraryMismatch, which names both
files. It uses only information of the system's loader (`_dl`), so it sees libraries of other packages, too.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, NamedTuple

from cudabind import LIBRARIES, Library, _dl
from cudabind.errors import LibraryMismatch

if TYPE_CHECKING:
    import ctypes

OVERRIDE = "CUDABIND_{}_PATH"
HINT = (
    "use both from one place: install them together, or set {} and {} to files of one release. If another package has "
    "loaded the second into this process, use the first from the same place, or use it before that package is imported"
)
UNMET = r"(/[^:;]*): undefined symbol: ([^\s,;]+)(?:, version ([^\s,;]+))?"


class Opened(NamedTuple):
    """A library in use: its handle, the file it came from, how that was found, and its version."""

    dll: ctypes.CDLL
    path: str
    found_by: str
    version: str


def check_parts(row: Library, dll: ctypes.CDLL) -> None:
    """Check that the parts which a library loads by itself are those in its own folder.

    This happens before the library's first function runs, which loads parts: libcudnn.so.9 ends the process if it finds
    none, and silently uses a part of another release if one is in the process already.
    """
    if not row.parts:
        return
    from pathlib import Path  # takes several ms to import, and is needed only where a library is opened

    path = _dl.origin(dll)
    parts = sorted(Path(path).parent.glob(row.parts))
    if not parts:
        text = f"{path} is not in the same folder as its own parts: there is no {row.parts} beside it."
        raise LibraryMismatch(row.name, text=text, hint=f"set {variable(row)} to a folder that holds all of them")
    for part in parts:
        used = _dl.loaded(part.name)
        if used is not None and not os.path.samefile(used, part):
            text = f"{path} does not match {used}, which is already loaded in this process."
            hint = (
                f"set {variable(row)} to {os.path.dirname(used)}, or use {row.name} before the package that loads"
                " that one"
            )
            raise LibraryMismatch(row.name, text=text, hint=hint)


def check_linked(row: Library, opened: Opened, need: Library) -> None:
    """Check that a library is linked with a copy of another one which is on its own search path.

    Any copy on that path is accepted: LD_LIBRARY_PATH is part of it, and may name a toolkit beside the wheels in use.
    If there is none on the path, only the loader's own check of symbols applies.
    """
    used = _dl.exporter(opened.dll, need.version)
    if used is None:
        return
    name = next((soname for soname in need.sonames.split() if os.path.basename(used).startswith(soname)), "")
    folders = dict.fromkeys([os.path.dirname(opened.path), *_dl.search_path(opened.dll)])
    candidates = [file for folder in folders if os.path.isfile(file := os.path.join(folder, name))]
    if candidates and not any(os.path.samefile(file, used) for file in candidates):
        raise mismatch(row, opened, need, used, f"which is already loaded in this process; its own is {candidates[0]}")


def check_in_use(user: Library, opened: Opened, need: Library, path: str) -> None:
    """Check that a library is linked with the same file that this process uses for the other library."""
    used = _dl.exporter(opened.dll, need.version)
    if used is not None and not os.path.samefile(used, path):
        raise mismatch(user, opened, need, path, f"which is in use: it is linked with {used}")


def check_release(row: Library, opened: Opened, twin: Library, other: Opened) -> None:
    """Check that two libraries that NVIDIA releases together are in one folder and report one version."""
    if opened.version != other.version or os.path.dirname(opened.path) != os.path.dirname(other.path):
        raise mismatch(row, opened, twin, other.path, "which is in use", other.version)


def mismatch(row: Library, opened: Opened, other: Library, path: str, why: str, version: str = "") -> LibraryMismatch:
    """The error that names two libraries, their versions and their files."""
    # A library with a twin, such as libcublas, reports the version of the twin that it is linked with.
    first = f"{row.file} ({opened.path})" if row.twin else f"{row.file} {opened.version} ({opened.path})"
    second = f"{other.file} {version} ({path})" if version else f"{other.file} ({path})"
    text = f"{first} does not match {second}, {why}."
    return LibraryMismatch(row.name, text=text, hint=HINT.format(variable(row), variable(other)))


def unmet(row: Library, message: str) -> LibraryMismatch | None:
    """The error if the loader's message says that a library needs a symbol which another one lacks, else None."""
    match = re.search(UNMET, message)
    if match is None:
        return None
    file, symbol, soname = match.groups()
    used = _dl.loaded(soname) if soname else None
    lacking = (
        f"{used}, which is already loaded in this process, does"
        if used
        else f"the {soname or 'one'} that it finds does"
    )
    text = f"{os.path.realpath(file)} needs {symbol}, and {lacking} not have it: the two are of different releases."
    needing, needed = _row_of(os.path.basename(file)) or row, _row_of(soname) if soname else None
    hint = HINT.format(variable(needing), variable(needed) if needed else "the other's")
    return LibraryMismatch(row.name, text=text, hint=hint)


def _row_of(soname: str) -> Library | None:
    return next((row for row in LIBRARIES.values() if soname in row.sonames.split()), None)


def variable(row: Library) -> str:
    """The environment variable that overrides where a library comes from."""
    return OVERRIDE.format(row.file.upper())
