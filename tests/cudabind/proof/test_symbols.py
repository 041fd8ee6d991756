"""Every function that a module binds is in the installed library, or listed with its reason; and no reason is stale."""

from __future__ import annotations

import functools
import importlib
import re
import shutil
import subprocess
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cudabind
from cudabind import _bind, _lazy, _load
from cudabind.errors import LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable
    from types import ModuleType

# By module, with the library that exports its functions.
MODULES = {
    row.module.rpartition(".")[2]: row.name
    for row in cudabind.LIBRARIES.values()
    if row.module.startswith("cudabind.sys.")
} | {"cublas_legacy": "cublas"}
WITH_VARIABLES = {"cutensor", "nvshmem"}
WORD = re.compile(r"[A-Za-z]\w+")
# Every library has so many functions or more.
FEW = 10
# Exported without being declared: on, for programs that were linked before, or already, in a release before.
UNDECLARED = {
    "nppc": {
        "nppGetGpuDeviceProperties",
        "nppGetGpuName",
        "nppGetGpuNumSMs",
        "nppGetMaxThreadsPerBlock",
        "nppGetMaxThreadsPerSM",
        "nppGetStream",
        "nppGetStreamContext",
        "nppGetStreamMaxThreadsPerSM",
        "nppGetStreamNumSMs",
        "nppSetStream",
    },
    "nccl": {"ncclResetDebugInit", "pncclResetDebugInit"},
    "cutensor": {
        *("cutensorBlockSparseContract", "cutensorCreateBlockSparseContraction"),
        *("cutensorCreateBlockSparseTensorDescriptor", "cutensorDestroyBlockSparseTensorDescriptor"),
    },
}
# The headers of nvJitLink 13.0 were the first to declare these.
NVJITLINK_SINCE = {"nvJitLinkGetLinkedLTOIR": "13.0", "nvJitLinkGetLinkedLTOIRSize": "13.0"}


class Installed:
    """A module with the installed library: what it binds, and what of it the library exports."""

    def __init__(self, name: str) -> None:
        self.module: ModuleType = importlib.import_module(f"cudabind.sys.{name}")
        try:
            self.dll: ctypes.CDLL = _load.open(MODULES[name])
        except LibraryNotFound as error:
            pytest.skip(str(error))
        self.version = _load.version(MODULES[name])
        self.bound = set(_bind.symbols(self.module))
        names: _lazy.Module = self.module._names
        # An older library may export a function under another name.
        self.exported = {each for each in self.bound if hasattr(self.dll, names.symbol(each))}


@pytest.fixture(params=MODULES)
def installed(request: pytest.FixtureRequest) -> Installed:
    return Installed(request.param)


def test_every_function_resolves_or_is_listed(installed: Installed) -> None:
    module = installed.module
    listed = module.NOT_EXPORTED.keys() | module.SINCE.keys() | module.UNTIL.keys()
    assert len(installed.exported) >= FEW
    assert installed.bound - installed.exported <= listed
    assert _bind.expected(module, installed.version) <= installed.exported


# What a header names of its own library's functions without declaring it.
NAMED = {"cuFileDriverClose": "a macro has programs call cuFileDriverClose_v2 by this name"}


def test_what_a_library_exports_and_its_headers_name_is_bound(installed: Installed) -> None:
    """Whatever hides a declaration from C, as another language or a macro that is to be defined first."""
    pytest.importorskip("clang", reason="cudabind.gen, which knows the headers, needs libclang")
    if shutil.which("nm") is None:
        pytest.skip("binutils are not installed")
    from cudabind.gen.libraries import ROWS

    name = installed.module.__name__.rpartition(".")[2]
    path = _load.path(MODULES[name])
    # One file may be the library of several modules.
    mine = [row for row in ROWS if row.prefixes and row.module in MODULES and is_at(path, MODULES[row.module])]
    folder = Path(path).parents[1] / "include"
    if not folder.is_dir():
        pytest.skip(f"{name} is installed without its headers")
    if newer := newer_than_read(Path(path)):
        pytest.skip(newer)
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.split()[-2] in "TWi"}
    prefixes = tuple(prefix for row in mine for prefix in row.prefixes)
    modules = [importlib.import_module(f"cudabind.sys.{row.module}") for row in mine]
    named = [(module, each) for module in modules for each in _bind.symbols(module)]
    bound = {name for module, each in named for name in (each, module._names.symbol(each))}
    left_out = [pattern for module in modules for pattern in module.LEFT_OUT]
    unbound = {each for each in exported & words_of(folder) if each.startswith(prefixes)} - bound - NAMED.keys()
    assert {each for each in unbound if not any(fnmatch(each, pattern) for pattern in left_out)} == set()


@functools.cache
def words_of(folder: Path) -> frozenset[str]:
    """What the headers of a folder, which most libraries have in common, name at all."""
    from cudabind.gen.libraries import HEADERS_LEFT_OUT

    headers = [each for each in folder.rglob("*.h") if not left_out_header(each.relative_to(folder), HEADERS_LEFT_OUT)]
    return frozenset(word for each in headers for word in WORD.findall(each.read_text(errors="replace")))


def newer_than_read(path: Path) -> str:
    """In words where a library is of a wheel that is newer than all whose headers were read: it may export more."""
    from cudabind.gen.pins import WHEELS

    for pins in WHEELS:
        for package in (pins.cu12, pins.cu13):
            try:
                wheel = metadata.distribution(package)
            except metadata.PackageNotFoundError:
                continue
            files = [each.locate() for each in wheel.files or () if each.name == path.name]
            newest = max(pins.versions, key=_bind.key)
            if any(Path(each).resolve() == path.resolve() for each in files) and _bind.key(wheel.version) > _bind.key(
                newest
            ):
                return f"{package} {wheel.version} is newer than {newest}, the newest in cudabind/gen/pins.py"
    return ""


def is_at(path: str, library: str) -> bool:
    try:
        return _load.path(library) == path
    except LibraryNotFound:
        return False


def left_out_header(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(part, pattern.removesuffix(".h") + "*") for part in path.parts for pattern in patterns)


def test_what_is_listed_as_not_exported_or_inline_is_not_exported(installed: Installed) -> None:
    listed = [*installed.module.NOT_EXPORTED, *installed.module.LEFT_OUT]
    assert [name for name in listed if "*" not in name and hasattr(installed.dll, name)] == []


def test_what_is_listed_as_newer_or_removed_is_not_exported(installed: Installed) -> None:
    pytest.importorskip("clang", reason="cudabind.gen, which knows the versions that were read, needs libclang")
    from cudabind.gen import sources
    from cudabind.gen.libraries import ROWS
    from cudabind.gen.pins import RELEASES

    name = installed.module.__name__.rpartition(".")[2]
    row = next(row for row in ROWS if row.module == name)
    read = sorted(_lazy.key(sources.version(row, release)) for release in RELEASES)
    # A library between two that were read may be the first with a function, or the last.
    mine = _lazy.key(installed.version)
    next_read = min((version for version in read if version >= mine), default=mine)
    last_read = max((version for version in read if version <= mine), default=mine)
    newer = {each for each, since in installed.module.SINCE.items() if _lazy.key(since) > next_read}
    removed = {each for each, until in installed.module.UNTIL.items() if _lazy.key(until) < last_read}
    assert (newer | removed) & installed.exported <= UNDECLARED.get(name, set())


def test_what_does_not_resolve_says_why_at_the_call(installed: Installed) -> None:
    module = installed.module
    for name in installed.bound - installed.exported:
        with pytest.raises(SymbolNotFound) as caught:
            _ = getattr(module, name).unchecked
        assert installed.version in str(caught.value)
        known = [table[name] for table in (module.SINCE, module.UNTIL) if name in table]
        told = [name] if name in module.NOT_EXPORTED or not known else known
        assert any(each in str(caught.value) for each in told)


def test_every_exported_function_can_be_bound_with_its_types(installed: Installed) -> None:
    for name in installed.exported:
        function = getattr(installed.module, name)
        assert len(function.unchecked.argtypes) == len(function.__wrapped__.__annotations__) - 1


def test_every_variable_of_the_library_is_there(installed: Installed) -> None:
    module = installed.module
    variables = module._names.variables()
    due = [name for name in variables if _lazy.key(module.SINCE.get(name, "0")) <= _lazy.key(installed.version)]
    assert [name for name in due if getattr(module, name) is None] == []
    assert bool(due) is (installed.module.__name__.rpartition(".")[2] in WITH_VARIABLES)


@pytest.mark.parametrize("name", ["runtime", "nvrtc", "nvjitlink"])
def test_every_function_over_cuda_python_resolves_or_is_newer(name: str) -> None:
    library = {"runtime": "cudart", "nvrtc": "nvrtc", "nvjitlink": "nvJitLink"}[name]
    try:
        dll, version = _load.open(library), _load.version(library)
    except LibraryNotFound as error:
        pytest.skip(str(error))
    bindings = metadata.version("cuda-bindings")
    if _lazy.key(version) < _lazy.key(".".join(bindings.split(".")[:2])):
        pytest.skip(f"cuda-bindings {bindings} may bind what {library} {version} does not have yet")
    symbols: dict[str, str] = importlib.import_module(f"cudabind.{name}").symbols()
    newer = {each for each, since in NVJITLINK_SINCE.items() if _lazy.key(version) < _lazy.key(since)}
    assert len(symbols) > 10
    assert {each for each, symbol in symbols.items() if not hasattr(dll, symbol)} == newer & symbols.keys()
