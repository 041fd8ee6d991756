"""Finds and opens the shared libraries; the only file that knows a path.

Called by `_bind` on the first call into a library and by `python -m cudabind list`. The order is the override
`CUDABIND_<LIBRARY>_PATH`, then cuda.pathfinder, then the plain soname for the system's loader. It never looks in the
current directory, never opens a relative path, and never lets two libraries of one family disagree.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cudabind import LIBRARIES, Library
from cudabind.errors import LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OVERRIDE", "VERSION_STYLES", "open", "path", "version"]

OVERRIDE = "CUDABIND_{}_PATH"
RTLD_DI_LINKMAP = 2


class _Opened(NamedTuple):
    """A library in use: its handle, the file it came from, and its version."""

    dll: ctypes.CDLL
    path: str
    version: str


_opened: dict[str, _Opened] = {}
_lock = threading.RLock()


def open(library: str) -> ctypes.CDLL:  # noqa: A001 - the module is always named at the call: _load.open(…)
    """Open a library once per process.

    Args:
        library: a name of `cudabind.LIBRARIES`, such as ``"cublasLt"``.

    Raises:
        LibraryNotFound: it is in none of the places, which the error lists.
        LibraryMismatch: a library of the same family is open from another place or in another version.
    """
    return _open(library).dll


def path(library: str) -> str:
    """The absolute path of the file the library was opened from; opens it, and raises as `open` does."""
    return _open(library).path


def version(library: str) -> str:
    """The version the library itself tells, such as ``"13.1.0"``; opens it, and raises as `open` does."""
    return _open(library).version


def _open(library: str) -> _Opened:
    row = LIBRARIES[library]
    found = _opened.get(row.file)
    if found is not None:
        return found
    with _lock:
        if row.file not in _opened:
            dll = _find(row)
            _opened[row.file] = _Opened(dll, _origin(dll), _ask_version(dll, row))
        return _opened[row.file]


def _find(row: Library) -> ctypes.CDLL:
    """Try each place in turn, remembering why each refused."""
    variable = OVERRIDE.format(row.file.upper())
    override = os.environ.get(variable)
    if override is not None:
        # An override is an order: falling back to another file would hide a mistake in it.
        return _open_override(row, variable, override)
    reasons = [f"{variable} is not set"]
    located = _ask_pathfinder(row, reasons)
    for candidate in (located, *row.sonames.split()):
        if candidate is None:
            continue
        try:
            return ctypes.CDLL(candidate)
        except OSError as error:
            reasons.append(f"the system's loader, {candidate}: {error}")
    raise _not_found(row, reasons, f"{row.install}, or set {variable} to the library's absolute path")


def _open_override(row: Library, variable: str, override: str) -> ctypes.CDLL:
    file = Path(override)
    if not file.is_absolute():
        raise _not_found(row, [f"{variable}={override} is not an absolute path"], f"set {variable} to an absolute path")
    if file.is_dir():
        file /= row.sonames.split()[0]
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise _not_found(row, [f"{variable}={override}: {error}"], f"correct {variable} or unset it") from error


def _ask_pathfinder(row: Library, reasons: list[str]) -> str | None:
    from cuda import pathfinder  # takes several ms to import, and is needed only where a library is called

    try:
        found = pathfinder.load_nvidia_dynamic_lib(row.file)
    except (RuntimeError, ValueError) as error:  # not found, not usable, or a name that this pathfinder does not know
        reasons.append(f"cuda.pathfinder: {' '.join(str(error).split())}")
        return None
    return str(found.abs_path)


def _not_found(row: Library, reasons: list[str], hint: str) -> LibraryNotFound:
    text = f"{row.sonames} was not found. Looked for it in: " + "; ".join(reasons) + "."
    return LibraryNotFound(row.name, text=text, hint=hint)


class _LinkMap(ctypes.Structure):
    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


def _origin(dll: ctypes.CDLL) -> str:
    """Ask the system's loader which file a handle stands for: a soname alone does not tell."""
    entry = ctypes.POINTER(_LinkMap)()
    status = ctypes.CDLL(None).dlinfo(ctypes.c_void_p(dll._handle), RTLD_DI_LINKMAP, ctypes.byref(entry))
    if status != 0:
        return dll._name
    return os.path.realpath(os.fsdecode(entry.contents.l_name))


def _ask_version(dll: ctypes.CDLL, row: Library) -> str:
    if row.version_style == "with":
        return _open(row.version).version
    try:
        function = dll[row.version]
    except AttributeError as error:
        text = f"{_origin(dll)} does not export {row.version}, so it is not {row.name}."
        raise SymbolNotFound(row.name, row.version, text=text, hint=row.install) from error
    function.restype = ctypes.c_int
    return VERSION_STYLES[row.version_style](function)


def _property(function: Callable[..., int]) -> str:
    """Major, minor and patch by libraryPropertyType 0, 1, 2, as cublasLtGetProperty has it."""
    value = ctypes.c_int()
    return ".".join(str(value.value) for kind in range(3) if function(kind, ctypes.byref(value)) == 0)


def _thousands(function: Callable[..., int]) -> str:
    """One number, 1000 major + 10 minor, as cuDriverGetVersion has it."""
    value = ctypes.c_int()
    function(ctypes.byref(value))
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def _pair(function: Callable[..., int]) -> str:
    """Major and minor in two results, as nvrtcVersion has it."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    function(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _returned(function: Callable[..., int]) -> str:
    """One number, 10000 major + 100 minor + patch, as cutensorGetVersion returns it."""
    return _decimal_parts(function())


def _decimal(function: Callable[..., int]) -> str:
    """The same number in a result, as ncclGetVersion has it."""
    value = ctypes.c_int()
    function(ctypes.byref(value))
    return _decimal_parts(value.value)


def _decimal_parts(value: int) -> str:
    return f"{value // 10000}.{value // 100 % 100}.{value % 100}"


VERSION_STYLES: dict[str, Callable[[Callable[..., int]], str]] = {
    "property": _property,
    "thousands": _thousands,
    "pair": _pair,
    "returned": _returned,
    "decimal": _decimal,
}
