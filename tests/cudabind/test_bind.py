"""The binding machinery with a library of our own: what a signature becomes, and that threads may race for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from enum import IntEnum
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import cudabind
from cudabind import _bind, _load
from cudabind.errors import CudaError, LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
typedef struct { double x; int n; } tinyPair;
int tinyVersion(int *value) { *value = 2010; return 0; }
int tinyDo(int status) { return status; }
long long tinyAdd(long long a, int b) { return a + b; }
const char *tinyText(int status) { return status == 3 ? "it is three" : 0; }
void tinyNothing(void) {}
double tinySum(const tinyPair *pair) { return pair->x + pair->n; }
"""

MODULE = """
from __future__ import annotations
from ctypes import Structure
from enum import IntEnum
from cudabind._bind import Mem, Ptr, SysLibrary, char_p, float64, int32_t, int64_t, struct
from cudabind.errors import CudaError

class tinyStatus(IntEnum):
    TINY_OK = 0
    TINY_BAD = 3

@struct
class tinyPair(Structure):
    x: float64
    n: int32_t

_lib = SysLibrary("tiny", tinyStatus, CudaError, "tinyText")

@_lib.status
def tinyDo(status: int32_t, /) -> tinyStatus: ...
@_lib.value
def tinyAdd(a: int64_t, b: int32_t, /) -> int64_t: ...
@_lib.value
def tinyText(status: tinyStatus, /) -> str: ...
@_lib.value
def tinyNothing() -> None: ...
@_lib.value
def tinySum(pair: Ptr[tinyPair], /) -> float64: ...
@_lib.status
def tinyGone() -> tinyStatus: ...
"""


def import_text(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(MODULE, vars(module))
    return module


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "tiny.c").write_text(SOURCE)
    library = tmp_path / "libtiny.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "tiny.c"], check=True)
    row = cudabind.Library("tiny", "tiny", "libtiny.so.1", "tinyVersion", "thousands", "pip install tiny")
    monkeypatch.setitem(cudabind.LIBRARIES, "tiny", row)
    monkeypatch.setenv("CUDABIND_TINY_PATH", str(library))
    yield import_text("cudabind_test_tiny")
    _load._opened.pop("tiny", None)
    del sys.modules["cudabind_test_tiny"]


def test_success_is_none_and_failure_an_error_with_the_librarys_words(tiny: ModuleType) -> None:
    assert tiny.tinyDo(0) is None
    with pytest.raises(CudaError) as caught:
        tiny.tinyDo(3)
    assert (caught.value.status, caught.value.name, caught.value.text) == (3, "TINY_BAD", "it is three")


def test_a_status_that_the_header_does_not_know_is_reported_too(tiny: ModuleType) -> None:
    with pytest.raises(CudaError, match=r"an unknown status \(99\)"):
        tiny.tinyDo(99)


def test_values_come_back_as_python_values(tiny: ModuleType) -> None:
    assert tiny.tinyAdd(2**40, 2) == 2**40 + 2
    assert tiny.tinyText(3) == "it is three"
    assert tiny.tinyText.unchecked(3) == b"it is three"
    assert tiny.tinyNothing() is None


def test_a_struct_is_passed_by_reference_and_has_the_fields_of_its_annotations(tiny: ModuleType) -> None:
    pair = tiny.tinyPair(x=1.5, n=2)
    assert tiny.tinySum(ctypes.byref(pair)) == tiny.tinySum(pair) == 3.5
    with pytest.raises(ctypes.ArgumentError):
        tiny.tinySum(ctypes.c_void_p())


def test_a_missing_symbol_raises_at_the_call_and_says_what_to_install(tiny: ModuleType) -> None:
    with pytest.raises(SymbolNotFound) as caught:
        tiny.tinyGone()
    assert caught.value.function == "tinyGone"
    for part in ("tiny 2.1", "libtiny.so.1", "pip install tiny"):
        assert part in str(caught.value)


def test_a_missing_library_raises_at_the_call(tiny: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDABIND_TINY_PATH", "/nowhere/libtiny.so.1")
    with pytest.raises(LibraryNotFound, match="/nowhere"):
        tiny.tinyDo(0)


def test_a_function_keeps_its_name_and_knows_its_library(tiny: ModuleType) -> None:
    assert repr(tiny.tinyDo) == "<tiny function tinyDo>"
    assert list(_bind.symbols(tiny)) == ["tinyDo", "tinyAdd", "tinyText", "tinyNothing", "tinySum", "tinyGone"]
    with pytest.raises(AttributeError, match="has no attribute 'uncheked'"):
        tiny.tinyDo.uncheked  # noqa: B018 - reading it is the test


def test_threads_that_race_to_bind_get_one_and_the_same_function(tiny: ModuleType) -> None:
    count = 16
    start = threading.Barrier(count)
    got: list[object] = []

    def bind() -> None:
        start.wait()
        got.append(tiny.tinyAdd.unchecked)
        assert tiny.tinyAdd(1, 1) == 2

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=bind) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(got) == count
    assert len(set(map(id, got))) == 1


def test_an_enum_argument_is_an_int_for_ctypes(tiny: ModuleType) -> None:
    assert issubclass(tiny.tinyStatus, IntEnum)
    assert tiny.tinyText.unchecked.argtypes == (ctypes.c_int,)
