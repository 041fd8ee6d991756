"""Finds and opens the shared libraries, each once per process; the only file that decides where one comes from.

`_bind` calls it at the first call into a library, and `python -m cudabind list`. The order is the override
`CUDABIND_<LIBRARY>_PATH`, then cuda.pathfinder, then the sonames by the system's loader. It never looks in the current
directory, never opens a relative path, and refuses libraries that do not belong together (`_compat`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

from cudabind import EXTRAS, LIBRARIES, Library, _compat, _dl, extras
from cudabind._compat import Opened
from cudabind._fork import guard
from cudabind._version import STYLES, by_symbols
from cudabind.errors import CudaError, LibraryMismatch, LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["found_by", "in_short", "install", "open", "open_override", "path", "version"]

_opened: dict[str, Opened] = {}  # by Library.file: modules of one file share it
_lock = threading.RLock()
guard(_lock)  # modules that find libraries are imported while it is held


OLDEST = "12.9"  # the CUDA release to assume for a library that does not report its own


def open(library: str) -> ctypes.CDLL:  # noqa: A001 - the module is always named at the call: _load.open(…)
    """Open a library once per process.

    Args:
        library: a name of `cudabind.LIBRARIES`, such as ``"cublasLt"``.

    Raises:
        LibraryNotFound: it is in none of the places, which the error lists.
        LibraryMismatch: it does not belong to another library that it works with.
    """
    return _open(library).dll


def path(library: str) -> str:
    """The absolute path of the file the library was opened from; opens it, and raises as `open` does."""
    return _open(library).path


def version(library: str) -> str:
    """The version that the library reports, such as ``"13.1.0"``; opens it, and raises as `open` does."""
    return _open(library).version


def found_by(library: str) -> str:
    """How the file was found: the name of the override's variable, cuda.pathfinder's term, or the system's loader.

    ``"was-already-loaded-from-elsewhere"`` is cuda.pathfinder's term for a copy that another package has loaded.
    """
    return _open(library).found_by


def open_override(library: str) -> None:
    """Open an overridden library that cuda-python will load by its soname, so that it gets that file."""
    if _compat.variable(LIBRARIES[library]) in os.environ:
        _open(library)


def install(library: str) -> str:
    """What to install: the extra for CUDA 12 if cuda-python or the driver is of CUDA 12, else that for CUDA 13."""
    row = LIBRARIES[library]
    area = "" if row.install == EXTRAS else f"{row.area}-"
    if area and row.install != extras(row.area):
        return row.install
    from importlib import metadata  # takes several ms to import, and is needed only where something is missing

    versions = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions.append(metadata.version("cuda-bindings"))
    with contextlib.suppress(CudaError):
        versions.append(_open("cuda").version)
    of_12 = any(each.startswith("12.") for each in versions)
    return f"pip install 'cudabind[{area}{'cu12' if of_12 else 'cu13'}]'"


def in_short(error: Exception) -> str:
    """cuda.pathfinder's error for a library that was not found, with the folders it lists but not their contents."""
    text = str(error)
    folders = re.findall(r'^ *listdir\("(.*)"\):$', text, re.MULTILINE)
    if not folders:
        return " ".join(text.split())
    return f"{text.splitlines()[0]}, also in {', '.join(dict.fromkeys(folders))}"


def _open(library: str) -> Opened:
    row = LIBRARIES[library]
    opened_before = _opened.get(row.file)
    if opened_before is not None:
        return opened_before
    with _lock:
        if row.file not in _opened:
            _open_overridden_needs(row)
            dll, how = _find(row)
            _compat.check_parts(row, dll)
            opened = Opened(dll, _dl.origin(dll), how, _ask_version(dll, row))
            _check(row, opened)
            _opened[row.file] = opened  # last: no thread may see a library that was not checked
        return _opened[row.file]


def _open_overridden_needs(row: Library) -> None:
    """Open overridden libraries first: the loader links later ones with those loaded under the same sonames."""
    for need in row.needs:
        if _compat.variable(LIBRARIES[need]) in os.environ:
            _open(need)


def _check(row: Library, opened: Opened) -> None:
    """Raise LibraryMismatch if the library does not belong to those it is linked with, or to those open already."""
    for need in (LIBRARIES[name] for name in row.needs):
        _compat.check_linked(row, opened, need)
        if need.file in _opened:
            _compat.check_in_use(row, opened, need, _opened[need.file].path)
    for user in LIBRARIES.values():
        if row.file in user.needs and user.file in _opened:
            _compat.check_in_use(user, _opened[user.file], row, opened.path)
    if row.twin:
        _compat.check_release(row, opened, LIBRARIES[row.twin], _open(row.twin))


def _find(row: Library) -> tuple[ctypes.CDLL, str]:
    """Try each place in turn, collecting the reasons of failures; returns the handle, and the place."""
    variable = _compat.variable(row)
    override = os.environ.get(variable)
    if override is not None:
        # No fallback after an override, which would hide a mistake in it.
        return _open_override(row, variable, override), variable
    reasons = [f"{variable} is not set"]
    located, how = _look_into_wheels(row, reasons) if row.folders else _ask_pathfinder(row, reasons)
    for candidate in (located, *row.sonames.split()):
        if candidate is None:
            continue
        try:
            return ctypes.CDLL(candidate), how if candidate == located else "the system's loader"
        except OSError as error:
            _raise_unmet(row, error)
            reasons.append(f"the system's loader, {candidate}: {error}")
    raise _not_found(row, reasons, f"{install(row.name)}, or set {variable} to the library's absolute path")


def _open_override(row: Library, variable: str, override: str) -> ctypes.CDLL:
    from pathlib import Path  # takes several ms to import, and is needed only here

    file, shown = Path(override), os.fsencode(override).decode(errors="replace")  # may be bytes that are no text
    if not file.is_absolute():
        raise _not_found(row, [f"{variable}={shown} is not an absolute path"], f"set {variable} to an absolute path")
    try:
        if file.is_dir():
            names = row.sonames.split()
            file /= next((name for name in names if (file / name).exists()), names[0])
        if not row.module.startswith("cudabind.sys."):
            _refuse_second_copy(row, variable, file)
        return ctypes.CDLL(str(file))
    except (OSError, UnicodeDecodeError) as error:  # the second if the loader's message has such a path
        _raise_unmet(row, error)
        raise _not_found(row, [f"{variable}={shown}: {error}"], f"correct {variable} or unset it") from error


def _refuse_second_copy(row: Library, variable: str, file: Path) -> None:
    """Raise if another copy is loaded already: cuda-python loads by soname, and would go on using that one."""
    used = _dl.loaded(file.name)
    if used is not None and file.exists() and not os.path.samefile(used, file):
        text = f"{variable} names {file}, but {used} is already loaded in this process, and cuda-python calls that one."
        raise LibraryMismatch(row.name, text=text, hint=f"set {variable} before Python starts, or unset it")


def _ask_pathfinder(row: Library, reasons: list[str]) -> tuple[str | None, str]:
    from cuda import pathfinder  # takes several ms to import, and is needed only where a library is called

    try:
        loaded = pathfinder.load_nvidia_dynamic_lib(row.file)
    except (RuntimeError, ValueError) as error:  # not found, not usable, or unknown to this pathfinder
        _raise_unmet(row, error)
        reasons.append(f"cuda.pathfinder: {in_short(error)}")
        return None, ""
    return str(loaded.abs_path), str(loaded.found_via)


def _look_into_wheels(row: Library, reasons: list[str]) -> tuple[str | None, str]:
    """Look for a library that cuda.pathfinder does not know in the folders of its wheels, in every site-packages."""
    packages = [path for path in sys.path if os.path.isabs(path) and path.endswith("-packages")]
    for package in packages:
        for folder in row.folders.split():
            for soname in row.sonames.split():
                file = os.path.join(package, folder, soname)
                if os.path.isfile(file):
                    return file, "site-packages"
    reasons.append(f"{' and '.join(row.folders.split())} in {', '.join(packages)}: no such file")
    return None, ""


def _raise_unmet(row: Library, error: Exception) -> None:
    mismatch = _compat.unmet(row, str(error))
    if mismatch is not None:
        raise mismatch from error


def _not_found(row: Library, reasons: list[str], hint: str) -> LibraryNotFound:
    names = " or ".join(row.sonames.split())
    return LibraryNotFound(row.name, text=f"{names} was not found. Looked for it in: {'; '.join(reasons)}.", hint=hint)


def _ask_version(dll: ctypes.CDLL, row: Library) -> str:
    if row.version_style == "symbols":
        return by_symbols(dll, row.module, row.version)
    if not row.version:
        return _open(row.twin).version
    try:
        function = dll[row.version]
    except AttributeError as error:
        text = f"{_dl.origin(dll)} does not export {row.version}, so it is not {row.file}."
        raise SymbolNotFound(row.name, row.version, text=text, hint=install(row.name)) from error
    function.restype = ctypes.c_int
    return STYLES[row.version_style](function) or by_symbols(dll, row.module, OLDEST)
