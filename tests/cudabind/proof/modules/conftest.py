"""The generated modules as they are with some version of their library, each beside gcc's account of its headers.

Each module is held against the headers of every release that it was made from, as it is with a library of that release
loaded, and against the headers that lie beside the installed library, as it is with that one loaded. What was compared
is counted: a table of it ends the run where CUDABIND_PROOF_JSON names a file to write it to.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import importlib
import json
import os
import re
import shutil
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cudabind import LIBRARIES, _bind, _families, _lazy, _load, _types
from cudabind.errors import LibraryNotFound

pytest.importorskip("clang", reason="cudabind.gen, which knows where the headers are, needs libclang")
if shutil.which("gcc") is None:
    pytest.skip("gcc is not installed", allow_module_level=True)

from cudabind.gen import layout, sources
from cudabind.gen.__main__ import SYS
from cudabind.gen.libraries import ROWS
from cudabind.gen.pins import RELEASES
from cudabind.gen.wheels import WheelError

if TYPE_CHECKING:
    from types import ModuleType

    from cudabind.gen.row import Row
    from tests.cudabind.proof.conftest import Headers

INSTALLED = "installed"
MODULES = {row.module: row for row in ROWS if not row.symbols}
TABLES = {"SINCE", "UNTIL", "LEFT_OUT", "NOT_EXPORTED", "BEFORE"}
# The library that tells the version of headers which belong to no module's library alone.
SHARED = {"runtime": "cudart", "cublas": "cublas", "cusparse": "cusparse", "cusolver": "cusolverDn"}


class Proof:
    """A module as it is with some version of its library, beside gcc's account of that version's headers."""

    def __init__(self, row: Row, module: ModuleType, version: str, headers: Headers) -> None:
        self.row = row
        self.module = module
        self.version = version
        self.headers = headers
        self.was_read = version in [sources.version(row, release) for release in RELEASES]
        self.is_newer = not self.was_read and _lazy.key(version) > _lazy.key(sources.version(row, RELEASES[-1]))

    def has(self, name: str) -> bool:
        return name in self.names

    @cached_property
    def names(self) -> set[str]:
        """Everything the module offers, with what it takes from other modules."""
        hidden = {"annotations", "lazy", "Annotated", "TYPE_CHECKING", self.row.error} | TABLES
        rooms = [
            vars(room) for room in (ctypes, _bind, _families, _lazy, _types)
        ]  # what a module imports to write itself in
        return {
            name
            for name in dir(self.module)
            if not name.startswith("_")
            and "_before_" not in name  # an older form of a type, under a name of ours
            and name not in hidden
            and not any(name in room for room in rooms)
        }

    @cached_property
    def own(self) -> set[str]:
        """What the module itself declares."""
        used = [importlib.import_module(f"cudabind.sys.{module}") for module in self.row.uses]
        return self.names - {name for module in used for name in dir(module)}

    @cached_property
    def declared(self) -> set[str]:
        """Every name that the headers themselves declare; enumerators with those of nameless enums only."""
        headers = self.headers
        names = {*headers.types, *headers.functions, *headers.constants, *headers.variables, *headers.macro_values}
        return names | {*headers.renamed, *headers.enums.get("", ())}

    def is_due(self, name: str) -> bool:
        """Whether the module says that this version has the name."""
        since, until = self.module.SINCE.get(name, "0"), self.module.UNTIL.get(name, "9999")
        return _lazy.key(since) <= _lazy.key(self.version) <= _lazy.key(until)

    @cached_property
    def opaque(self) -> set[str]:
        """Types of which only a pointer can be passed: incomplete ones and arrays."""
        return {name for name in self.headers.opaque if not self.has(name)}

    def enum(self, name: str) -> type[enum.IntEnum] | None:
        """The enum of a name, if the module has one."""
        made = getattr(self.module, name, None)
        return made if isinstance(made, type) and issubclass(made, enum.IntEnum) else None


class Proofs:
    """Makes each proof once: several tests ask gcc about the same headers."""

    def __init__(self, headers: type[Headers], work: pytest.TempPathFactory) -> None:
        self._headers = headers
        self._work = work
        self.of = cache(self._of)

    def _of(self, module: str, release: str) -> Proof:
        row = MODULES[module]
        if release == INSTALLED:
            return self._installed(row)
        try:
            read = self._read(row, sources.headers(row, release), sources.folders(row, release)[:-1])
        except WheelError as error:
            pytest.skip(f"NVIDIA's headers cannot be had: {error}")
        version = sources.version(row, release)
        return Proof(row, self._loaded(module, version), version, read)

    def _loaded(self, module: str, version: str) -> ModuleType:
        """A module as it is with this version of its library; NPP's have their types from another one of NPP."""
        text = (SYS / f"{module}.py").read_text()
        others = {other: self._loaded(other, version) for other in re.findall(r"_names as _(\w+)", text)}
        return layout.load(module, text, version, others)

    def _installed(self, row: Row) -> Proof:
        library = row.library or (row.module if row.module in LIBRARIES else SHARED[row.wheel])
        try:
            version, own = _load.version(library), Path(_load.path(library)).parents[1] / "include"
            cuda = _load.version("cudart")
        except LibraryNotFound as error:
            pytest.skip(str(error))
        if not (own / row.headers[0]).is_file():
            pytest.skip(f"{library} is installed without its headers: no {own / row.headers[0]}")
        beside = [sources.revealed(row, own), own] if row.revealed else [own]
        for other in ("cudart", "cublas", "cusparse", "cutensor"):
            with contextlib.suppress(LibraryNotFound):  # the folders of a release, below, have its headers
                beside.append(Path(_load.path(other)).parents[1] / "include")
        release = [each for each in RELEASES if each.split(".")[0] == cuda.split(".")[0]][-1]
        try:
            folders = [*dict.fromkeys(beside), *sources.folders(row, release)[:-1]]
        except WheelError as error:
            pytest.skip(f"NVIDIA's headers cannot be had: {error}")
        there = tuple(header for header in row.headers if (own / header).is_file())
        module = importlib.import_module(f"cudabind.sys.{row.module}")
        return Proof(row, module, version, self._read(row, there, folders))

    def _read(self, row: Row, headers: tuple[str, ...], folders: list[Path]) -> Headers:
        # Some of CUDA's own types are declared in headers that the row's include.
        prologue = row.prologue if headers else ""
        work = self._work.mktemp(row.module)
        return self._headers(headers, folders, work, row.wheel == "runtime", row.included, prologue)


@pytest.fixture(scope="session")
def proofs(headers: type[Headers], tmp_path_factory: pytest.TempPathFactory) -> Proofs:
    with contextlib.suppress(WheelError):  # a module that cannot be had says so itself
        sources.prefetch()
    return Proofs(headers, tmp_path_factory)


def of_own_version(row: Row) -> tuple[str, ...]:
    """The releases, without those whose version of the library is the next one's, too: the module is made of that."""
    versions = {sources.version(row, release): release for release in RELEASES}
    return tuple(versions.values())


def compared(row: Row) -> tuple[str, ...]:
    """What a module is held against: of the libraries beside the toolkit's the newest release, unless all is asked for.

    All takes minutes: `CUDABIND_PROOF=all make test TESTS=tests/cudabind/proof`.
    """
    return (*of_own_version(row), INSTALLED) if is_proven_whole(row) else RELEASES[-1:]


def is_proven_whole(row: Row) -> bool:
    library = LIBRARIES.get(row.library or row.module)
    return library is None or library.area == LIBRARIES["cublas"].area or os.environ.get("CUDABIND_PROOF") == "all"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`proof` is every module with every release; `name` is every module."""
    if "proof" in metafunc.fixturenames:
        pairs = [
            pytest.param((module, release), id=f"{module}-{release}")
            for module, row in MODULES.items()
            for release in compared(row)
        ]
        metafunc.parametrize("proof", pairs, indirect=True, scope="module")
    elif "name" in metafunc.fixturenames:
        metafunc.parametrize("name", [module for module, row in MODULES.items() if is_proven_whole(row)])


@pytest.fixture(scope="module")
def proof(request: pytest.FixtureRequest, proofs: Proofs) -> Proof:
    return proofs.of(*request.param)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What passing tests compared, by module and release; a test tells it by `record_property`."""
    file = os.environ.get("CUDABIND_PROOF_JSON")
    if not file:
        return
    counts: dict[str, dict[str, int]] = {}
    for report in terminalreporter.stats.get("passed", []):
        pair = re.search(r"\[(\w+-[\w.]+)\]$", report.nodeid)
        if pair and report.when == "call":
            counts.setdefault(pair[1], {}).update({name: int(str(number)) for name, number in report.user_properties})
    Path(file).write_text(json.dumps(counts, indent=2) + "\n")
    for pair_name, numbers in counts.items():
        words = ", ".join(f"{number} {name}" for name, number in numbers.items())
        terminalreporter.write_line(f"{pair_name}: {words}")
