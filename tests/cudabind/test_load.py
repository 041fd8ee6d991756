"""Where a library is looked for, what is said when it is not there, and which libraries may not be mixed."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from ctypes.util import find_library
from typing import TYPE_CHECKING

import pytest

import cudabind
from cudabind import _load
from cudabind.errors import LibraryMismatch, LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAKES = {
    "fakeA": cudabind.Library(
        "fakeA", "none", "libfakeA.so.1", "fakeGetProperty", "property", "pip install fake", "fake"
    ),
    "fakeB": cudabind.Library(
        "fakeB", "none", "libfakeB.so.1", "fakeGetProperty", "property", "pip install fake", "fake"
    ),
    "fakeC": cudabind.Library("fakeC", "none", "libfakeC.so.1", "fakeGetVersion", "thousands", "pip install fake"),
}
SOURCE = """
int fakeGetProperty(int kind, int *value) {{ *value = kind == 0 ? {major} : kind; return 0; }}
int fakeGetVersion(int *value) {{ *value = 1000 * {major} + 50; return 0; }}
"""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of our own in the map, and nothing open yet."""
    monkeypatch.setattr(_load, "LIBRARIES", FAKES)
    monkeypatch.setattr(_load, "_opened", {})
    monkeypatch.setattr(_load, "_ask_pathfinder", lambda _row, _reasons: None)


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
    library = build(tmp_path / "one", "libfakeA.so.1", 3)
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(library))
    assert isinstance(_load.open("fakeA"), ctypes.CDLL)
    assert _load.path("fakeA") == str(library)
    assert _load.version("fakeA") == "3.1.2"
    monkeypatch.setenv("CUDABIND_FAKEB_PATH", str(build(tmp_path / "one", "libfakeB.so.1", 3).parent))
    assert _load.path("fakeB") == str(tmp_path / "one" / "libfakeB.so.1")


@pytest.mark.usefixtures("fakes")
def test_an_override_that_leads_nowhere_is_an_error_and_not_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(tmp_path / "gone.so"))
    with pytest.raises(LibraryNotFound, match=r"CUDABIND_FAKEA_PATH=.*gone\.so"):
        _load.open("fakeA")


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
    monkeypatch.setattr(_load, "_ask_pathfinder", lambda _row, reasons: reasons.append("cuda.pathfinder: no"))
    with pytest.raises(LibraryNotFound) as caught:
        _load.open("fakeA")
    for part in ("CUDABIND_FAKEA_PATH is not set", "cuda.pathfinder: no", "the system's loader, libfakeA.so.1"):
        assert part in caught.value.text
    assert "pip install fake" in caught.value.hint
    assert caught.value.status is None


@pytest.mark.usefixtures("fakes")
def test_two_of_a_family_must_come_from_one_place(
    tmp_path: Path, build: Callable[[Path, str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(build(tmp_path / "one", "libfakeA.so.1", 3)))
    monkeypatch.setenv("CUDABIND_FAKEB_PATH", str(build(tmp_path / "two", "libfakeB.so.1", 3)))
    _load.open("fakeA")
    with pytest.raises(LibraryMismatch, match=r"fakeB 3\.1\.2 .*/two/.* does not belong to fakeA 3\.1\.2 .*/one/"):
        _load.open("fakeB")


@pytest.mark.usefixtures("fakes")
def test_two_of_a_family_must_agree_in_version(
    tmp_path: Path, build: Callable[[Path, str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(build(tmp_path / "one", "libfakeA.so.1", 3)))
    monkeypatch.setenv("CUDABIND_FAKEB_PATH", str(build(tmp_path / "one", "libfakeB.so.1", 4)))
    _load.open("fakeA")
    with pytest.raises(LibraryMismatch, match=r"fakeB 4\.1\.2 .* does not belong to fakeA 3\.1\.2"):
        _load.open("fakeB")


@pytest.mark.usefixtures("fakes")
def test_libraries_of_no_family_may_come_from_anywhere(
    tmp_path: Path, build: Callable[[Path, str, int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", str(build(tmp_path / "one", "libfakeA.so.1", 3)))
    monkeypatch.setenv("CUDABIND_FAKEC_PATH", str(build(tmp_path / "two", "libfakeC.so.1", 12)))
    _load.open("fakeA")
    assert _load.version("fakeC") == "12.5"


@pytest.mark.usefixtures("fakes")
def test_a_file_that_is_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    libm = find_library("m")
    path = libm and next((f"{folder}/{libm}" for folder in LIB_FOLDERS if os.path.exists(f"{folder}/{libm}")), None)
    if path is None:
        pytest.skip("the C library's libm was not found")
    monkeypatch.setenv("CUDABIND_FAKEA_PATH", path)
    with pytest.raises(SymbolNotFound, match="does not export fakeGetProperty, so it is not fakeA"):
        _load.open("fakeA")


LIB_FOLDERS = ("/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def test_importing_the_package_opens_no_library() -> None:
    code = (
        "from cudabind import driver, runtime, nvrtc, nvjitlink\nfrom cudabind.sys import cublasLt\n"
        "print([line for line in open('/proc/self/maps') if 'nvidia' in line or 'libcu' in line])"
    )
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("/proc/self/maps tells what is loaded, and this system has none")
    said = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
