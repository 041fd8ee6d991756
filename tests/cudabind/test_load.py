"""Where a library is looked for, what is said when it is not there, and which file is in use afterwards."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cudabind
from cudabind import _compat, _load
from cudabind.errors import LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable

FAKES = {
    row.name: row
    for row in (
        cudabind.Library(
            "fakeA",
            "cudabind.sys.fakeA",
            "libfakeA.so.2 libfakeA.so.1",
            "fakeGetProperty",
            "property",
            "pip install fake",
        ),
        cudabind.Library(
            "fakeC", "cudabind.sys.fakeC", "libfakeC.so.1", "fakeGetVersion", "thousands", "pip install fake"
        ),
    )
}
SOURCE = """
int fakeGetProperty(int kind, int *value) {{ *value = kind == 0 ? {major} : kind; return 0; }}
int fakeGetVersion(int *value) {{ *value = 1000 * {major} + 50; return 0; }}
"""
LIB_FOLDERS = ("/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
OPENED = [name for name, row in cudabind.LIBRARIES.items() if row.install == cudabind.EXTRAS]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of our own in the map, and nothing open yet."""
    for module in (_load, _compat):
        monkeypatch.setattr(module, "LIBRARIES", FAKES)
    monkeypatch.setattr(_load, "_opened", {})
    monkeypatch.setattr(_load, "_ask_pathfinder", lambda _row, _reasons: (None, ""))


@pytest.fixture
def build() -> Callable[[Path, str, int], Path]:
    def compile_fake(folder: Path, soname: str, major: int) -> Path:
        if shutil.which("gcc") is None:
            pytest.skip("gcc is not installed")
        folder.mkdir(exist_ok=True)
        source = folder / "fake.c"
        source.write_text(SOURCE.format(major=major))
        library = folder / soname
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        return library

    return compile_fake


@pytest.mark.usefixtures("fakes")
def test_the_override_names_a_file_or_its_folder(
    tmp_path: Path, build: Callable[[Path, str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build(tmp_path / "one", "libfakeC.so.1", 3)
    monkeypatch.setenv("CUDABIND_FAKEC_PATH", str(library))
    assert isinstance(_load.open("fakeC"), ctypes.CDLL)
    assert _load.path("fakeC") == str(library)
    assert _load.found_by("fakeC") == "CUDABIND_FAKEC_PATH"
    assert _load.version("fakeC") == "3.5"
    build(tmp_path / "one", "libfakeA.so.1", 4)
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(tmp_path / "one"))
    assert _load.path("fakeA") == str(tmp_path / "one" / "libfakeA.so.1")
    assert _load.version("fakeA") == "4.1.2"


@pytest.mark.usefixtures("fakes")
def test_a_folder_with_two_versions_gives_the_newer_one(
    tmp_path: Path, build: Callable[[Path, str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "one", "libfakeA.so.1", 12)
    build(tmp_path / "one", "libfakeA.so.2", 13)
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(tmp_path / "one"))
    assert _load.version("fakeA") == "13.1.2"


@pytest.mark.usefixtures("fakes")
def test_an_override_that_leads_nowhere_is_an_error_and_not_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(tmp_path / "gone.so"))
    with pytest.raises(LibraryNotFound, match=r"CUDABIND_FAKEA_PATH=.*gone\.so"):
        _load.open("fakeA")


@pytest.mark.parametrize("override", [b"/" + 300 * b"x", b"/" + 5000 * b"x/", b"/\xff/libfakeA.so.1", b"\xff"], ids=len)
@pytest.mark.usefixtures("fakes")
def test_an_override_that_no_file_can_have_is_named(monkeypatch: pytest.MonkeyPatch, override: bytes) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", os.fsdecode(override))
    with pytest.raises(LibraryNotFound, match="CUDABIND_FAKEA_PATH=") as caught:
        _load.open("fakeA")
    assert override.decode(errors="replace") in str(caught.value)
    str(caught.value).encode()  # it can be printed


@pytest.mark.usefixtures("fakes")
def test_a_relative_override_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", "libfakeA.so.1")
    with pytest.raises(LibraryNotFound, match="not an absolute path"):
        _load.open("fakeA")


@pytest.mark.usefixtures("fakes")
def test_the_current_directory_is_never_looked_in(
    tmp_path: Path, build: Callable[[Path, str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "here", "libfakeA.so.1", 1)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(LibraryNotFound):
        _load.open("fakeA")


@pytest.mark.usefixtures("fakes")
def test_absence_lists_every_place_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(_row: cudabind.Library, reasons: list[str]) -> tuple[None, str]:
        reasons.append("cuda.pathfinder: no")
        return None, ""

    monkeypatch.setattr(_load, "_ask_pathfinder", nowhere)
    with pytest.raises(LibraryNotFound) as caught:
        _load.open("fakeA")
    places = ("CUDABIND_FAKEA_PATH is not set", "cuda.pathfinder: no", "loader, libfakeA.so.2", "loader, libfakeA.so.1")
    for part in places:
        assert part in caught.value.text
    assert "pip install fake" in caught.value.hint
    assert caught.value.status is None


def test_a_folder_searched_in_vain_is_named_but_not_listed(tmp_path: Path) -> None:
    """cuda.pathfinder lists all that lies in CUDA_PATH, which in a toolkit is more than a screen can hold."""
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libunrelated.so.1").touch()
    code = (
        "import sys\n"
        "from cuda.pathfinder import load_nvidia_dynamic_lib\n"
        "from cudabind import _load\n"
        "try:\n    load_nvidia_dynamic_lib('cufftMp')\n"  # one that no extra of ours brings
        "except RuntimeError as error:\n    print(error, _load.in_short(error), sep='\\n---\\n')"
    )
    env = {**os.environ, "CUDA_PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    if "libunrelated" not in said.stdout:
        pytest.skip("this cuda.pathfinder knows no cufftMp, finds one, or lists no folders")
    short = said.stdout.split("\n---\n")[1]
    assert f"also in {tmp_path / 'lib64'}" in short
    assert "libunrelated" not in short


@pytest.mark.usefixtures("fakes")
def test_a_file_that_is_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    libm = find_library("m")
    path = libm and next((f"{folder}/{libm}" for folder in LIB_FOLDERS if os.path.exists(f"{folder}/{libm}")), None)
    if path is None:
        pytest.skip("the C library's libm was not found")
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", path)
    with pytest.raises(SymbolNotFound, match="does not export fakeGetProperty, so it is not fakeA"):
        _load.open("fakeA")


def test_what_to_install_is_the_extra_of_the_cuda_that_is_there() -> None:
    cuda = metadata.version("cuda-bindings").split(".")[0]
    assert cuda in ("12", "13")
    if cuda == "13" and _driver().startswith("12."):
        cuda = "12"
    assert _load.install("cufft") == f"pip install 'cudabind[cu{cuda}]'"
    assert _load.install("cuda") == "an NVIDIA GPU driver"


def _driver() -> str:
    try:
        return _load.version("cuda")
    except LibraryNotFound:
        return ""


@pytest.mark.parametrize("name", OPENED)
def test_each_library_opens_from_one_file_that_the_process_has_mapped(name: str) -> None:
    try:
        path = _load.path(name)
    except LibraryNotFound as missing:
        pytest.skip(f"{name} is not installed: {missing.hint}")
    row = cudabind.LIBRARIES[name]
    assert os.path.basename(path).startswith(tuple(row.sonames.split()))
    assert path in Path("/proc/self/maps").read_text()
    assert _load.version(name).count(".") in (1, 2)
    assert all(part.isdigit() for part in _load.version(name).split("."))
    # What pip says of the wheel, where it comes from one: an account that the library has no part in.
    wheel = next((each for each in metadata.distributions() if _holds(each, path)), None)
    if wheel is not None:
        assert wheel.version.startswith(_load.version(name))


def _holds(wheel: metadata.Distribution, path: str) -> bool:
    if not wheel.metadata["Name"].startswith("nvidia-"):
        return False
    return any(str(wheel.locate_file(file)) == path for file in wheel.files or () if ".so" in file.name)


def test_what_another_package_has_loaded_is_used_and_named() -> None:
    try:
        path = _load.path("curand")
    except LibraryNotFound as missing:
        pytest.skip(f"curand is not installed: {missing.hint}")
    code = (
        f"import ctypes; ctypes.CDLL({path!r})\n"
        "from cudabind import _load\n"
        "print(_load.path('curand'), _load.found_by('curand'))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("CUDABIND_")}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert said.stdout.split() == [path, "was-already-loaded-from-elsewhere"]


def test_importing_the_package_opens_no_library() -> None:
    code = (
        "from cudabind import driver, runtime, nvrtc, nvjitlink\nfrom cudabind.sys import cublasLt\n"
        "print([line for line in open('/proc/self/maps') if 'nvidia' in line or 'libcu' in line])"
    )
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("/proc/self/maps tells what is loaded, and this system has none")
    said = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
