"""A row's headers in a release: where they are, what they declare, and all releases of a row merged.

Called by `python -m cudabind.gen`, and by tests that hold the modules against a C compiler. It decides which wheels a
row's headers need; `wheels` fetches them, `parse` reads them, `merge` makes one of them.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cudabind.gen.libraries import ROWS
from cudabind.gen.merge import Merged, MergeError, merge
from cudabind.gen.parse import HeaderError, parse
from cudabind.gen.pins import BASE, BY_RELEASE, RELEASES, TOLD, WHEELS
from cudabind.gen.wheels import Wheel, alone, cache_folder, fetch, include

if TYPE_CHECKING:
    from cudabind.gen.model import Header
    from cudabind.gen.row import Row

C_SHIM = Path(__file__).parent / "c"  # the two headers of C++ that NVIDIA's C headers include


def wheel(library: str, release: str) -> Wheel:
    """The wheel of a row of WHEELS in a release."""
    pins = next(pins for pins in WHEELS if pins.library == library)
    package = pins.cu12 if release.startswith("12.") else pins.cu13
    return Wheel(package, pins.versions[RELEASES.index(release)])


def version(row: Row, release: str) -> str:
    """The version of a row's library in a release, as the library tells it; CUDA's own types go by the release."""
    if row.wheel in BY_RELEASE:
        return release
    number = wheel(row.wheel, release).version
    return TOLD.get((row.wheel, number)) or ".".join(number.split(".")[:3])


def wheels(row: Row, release: str) -> list[Wheel]:
    """The wheels that a row's headers need in a release, its own first."""
    return [wheel(library, release) for library in dict.fromkeys((row.wheel, *row.needs, *BASE))]


def folders(row: Row, release: str) -> list[Path]:
    """The folders to include a row's headers from, the compiler's own last; fetches what is not in the cache.

    Raises:
        WheelError: a wheel cannot be had.
        HeaderError: gcc is not installed.
    """
    needed = wheels(row, release)
    fetch(needed)
    found = [folder for each in needed for folder in include(each)]
    return [*(revealed(row, folder) for folder in found[:1] if row.revealed), *found, C_SHIM, compilers_own()]


def revealed(row: Row, folder: Path) -> Path:
    """A folder with a row's headers, out of one that has them, in which what they hide from C is to be seen."""
    texts = {name: (folder / name).read_text() for name in row.headers if (folder / name).is_file()}
    for pattern, instead in row.revealed:
        texts = {name: re.sub(pattern, instead, text) for name, text in texts.items()}
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    made = cache_folder() / "revealed" / f"{row.module}-{digest}"
    if not made.is_dir():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as work:
            whole = Path(work) / "whole"
            whole.mkdir()
            for name, text in texts.items():
                (whole / name).write_text(text)
            try:
                whole.rename(made)
            except OSError:  # another process was first
                if not made.is_dir():
                    raise
    return made


def headers(row: Row, release: str) -> tuple[str, ...]:
    """Those of a row's headers that the release has."""
    where = folders(row, release)[:-1]
    return tuple(header for header in row.headers if any((folder / header).is_file() for folder in where))


def header_of(row: Row, release: str) -> Header:
    """What a row's headers declare in a release.

    Raises:
        HeaderError: the headers could not be read.
        WheelError: a wheel cannot be had.
    """
    own = headers(row, release)
    prologue = row.prologue if own else ""
    return parse(own, folders(row, release), row.prefixes, row.types, row.included, prologue, row.status)


def releases(row: Row) -> tuple[str, ...]:
    """The releases that a module is made of; the names behind the driver's functions are the newest header's."""
    return RELEASES[-1:] if row.symbols else RELEASES


def prefetch(rows: tuple[Row, ...] = ROWS) -> None:
    """Have the headers of all releases of these rows in the cache: together, what asking pip costs is paid once.

    By one process at a time: where several begin together, one of them fetches for all.

    Raises:
        WheelError: a wheel cannot be had.
    """
    needed = [[wheel for row in rows for wheel in wheels(row, release)] for release in RELEASES]
    if all(wheel.folder.is_dir() for wanted in needed for wheel in wanted):
        return
    with alone(), ThreadPoolExecutor(len(needed)) as threads:  # pip takes one version of a package at a time
        list(threads.map(fetch, needed))


def merged(rows: tuple[Row, ...] = ROWS) -> dict[str, Merged]:
    """Rows with all their releases, by module.

    Raises:
        HeaderError: headers could not be read, or a header or type of a row is not in the newest release.
        MergeError: two releases differ in a way that there is no rule for.
        WheelError: a wheel cannot be had.
    """
    prefetch(rows)
    jobs = [(row, release) for row in rows for release in releases(row)]
    with ProcessPoolExecutor() as pool:
        read = pool.map(header_of, *zip(*jobs, strict=True))
        parsed = {(row.module, release): header for (row, release), header in zip(jobs, read, strict=True)}
    made = {}
    for row in rows:
        newest = parsed[row.module, RELEASES[-1]]
        missing = [*(set(row.headers) - set(headers(row, RELEASES[-1]))), *(set(row.types) - newest.types.keys())]
        if missing:
            raise HeaderError(f"{row.module}: not in release {RELEASES[-1]}: {', '.join(sorted(missing))}")
        try:
            versions = [(version(row, each), parsed[row.module, each]) for each in releases(row)]
            made[row.module] = merge(versions, row.inline_as, row.renumbered)
        except MergeError as error:
            raise MergeError(f"{row.module}: {error}") from error
    return made


@cache
def compilers_own() -> Path:
    """The folder of gcc's stddef.h and stdint.h.

    Raises:
        HeaderError: gcc is not installed.
    """
    try:
        found = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True)
    except OSError as error:
        raise HeaderError("gcc's own headers (stddef.h, stdint.h) are needed to parse NVIDIA's: install gcc") from error
    return Path(found.stdout.strip())
