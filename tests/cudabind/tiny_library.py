"""A library of our own in C, and the module that binds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

import cudabind
from cudabind import _load

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
typedef struct { double x; int n; } tinyPair;
const void *TINY_KIND = &TINY_KIND;
int tinyVersion(int *value) { *value = VERSION; return 0; }
int tinyDo(int status) { return status; }
long long tinyAdd(long long a, int b) { return a + b; }
unsigned long tinySize(unsigned long a, unsigned char b) { return a + b; }
const char *tinyText(int status) { return status == 3 ? "it is three" : 0; }
void tinyNothing(void) {}
double tinySum(const tinyPair *pair) { return pair->x + pair->n; }
int tinyEach(int n, int (*each)(int, void *), void *user) {
  int i, sum = 0;
  for (i = 0; i < n; i++) sum += each(i, user);
  return sum;
}
void *tinyRead(const void *object) { return (void *)object; }
int tinyFill(int *numbers, void *bytes) { if (numbers) *numbers = 7; if (bytes) *(int *)bytes = 7; return 0; }
int tinyLook(const int *number, const void *bytes) { return *number + *(const char *)bytes; }
int tinyCopyInt(const int *from, int *to, int n) { while (n--) to[n] = from[n]; return 0; }
int tinyCopyLong(const long long *from, long long *to, long long n) { while (n--) to[n] = from[n]; return n + 1; }
const char *tinyName(int status) { return "a name"; }
int tinyOnce(void) { return 1; }
int tinyOnce_2(void) { return 2; }
"""

MODULE = """
from __future__ import annotations
from ctypes import c_int32, c_int64
from typing import Annotated
from cudabind._bind import SysLibrary
from cudabind._families import Generic, T, U
from cudabind._lazy import Callback, Handle, IntEnum, Status, Structure, Value, lazy
from cudabind._types import ConstMem, Mem, Ptr, address, char_p, const_void_p, float64, int32_t, int64_t, size_t
from cudabind._types import uint8_t, void_p
from cudabind.errors import CudaError

SINCE = {"tinyLate": "3.1", "tinyNew": "3.0"}
UNTIL = {"tinyGoneForGood": "1.4"}
NOT_EXPORTED = {"tinyGone": "never there"}
BEFORE = (
    ("tinyBox", "3.0", "tinyBox_before_3_0"),
    ("tinyBox", "2.0", "tinyBox_before_2_0"),
    ("TINY_COUNT", "3.0", 2),
    ("TINY_VERSION", "3.0", 2100),
    ("tinyOnce", "3.0", "tinyOnce_2"),
)

class tinyStatus(IntEnum):
    TINY_OK = 0
    TINY_BAD = 3

class tinyMode(IntEnum):
    TINY_SLOW = 0
    TINY_FAST = 1
    TINY_COUNT = 3

tinyMode_t = tinyMode

class tinyPair(Structure):
    x: float64
    n: int32_t

class tinyBox_before_2_0(Structure):
    pair: tinyPair

class tinyBox_before_3_0(Structure):
    one: int64_t

class tinyBox(Structure):
    one: int64_t
    two: int64_t

class tinyConst_t(Handle): ...

class tinyObject_t(tinyConst_t): ...

class tinyEach_t(Callback):
    def __call__(self, index: int32_t, user: void_p, /) -> int32_t: ...

TINY_VERSION = 3100
TINY_KIND: tinyConst_t

_lib = SysLibrary("tiny", "tinyStatus", CudaError, "tinyText")

@_lib.status
def tinyDo(status: int32_t, /) -> tinyStatus: ...
@_lib.value
def tinyAdd(a: int64_t, b: int32_t, /) -> int64_t: ...
@_lib.value
def tinySize(a: size_t, b: uint8_t, /) -> size_t: ...
@_lib.value
def tinyNothing() -> None: ...
@_lib.value
def tinySum(pair: Ptr[tinyPair], /) -> float64: ...
@_lib.value
def tinyEach(n: int32_t, each: tinyEach_t, user: void_p, /) -> int32_t: ...
@_lib.value
def tinyRead(object: tinyConst_t, /) -> address: ...
@_lib.status
def tinyFill(numbers: Mem[c_int32], bytes_: void_p, /) -> tinyStatus: ...
@_lib.value
def tinyLook(number: ConstMem[c_int32], bytes_: const_void_p, /) -> int32_t: ...
@_lib.value
def tinyOnce() -> int32_t: ...
@_lib.status
def tinyGone() -> tinyStatus: ...
class _Copy(Status, Generic[T, U]):
    def __call__(self, from_: ConstMem[T], to: Mem[T], count: U, /) -> None: ...
tinyCopyInt: _Copy[c_int32, int32_t]; tinyCopyLong: _Copy[c_int64, int64_t]
tinyCopy: Annotated[_Copy[c_int32, int32_t], "tinyCopyInt"]
class _Words(Value):
    def __call__(self, status: tinyStatus, /) -> str: ...
tinyText: _Words; tinyName: _Words
@_lib.status
def tinyLate() -> tinyStatus: ...
@_lib.status
def tinyGoneForGood() -> tinyStatus: ...

_names = lazy(globals())
"""


def import_text(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(MODULE, vars(module))
    return module


def build(folder: Path, version: int) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source, library = folder / "tiny.c", folder / "libtiny.so.1"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DVERSION={version}", "-o", library, source], check=True)
    return library


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with its library nowhere to be found."""
    row = cudabind.Library("tiny", "tiny", "libtiny.so.1", "tinyVersion", "thousands", "pip install tiny")
    monkeypatch.setitem(cudabind.LIBRARIES, "tiny", row)
    monkeypatch.setenv("CUDABIND_TINY_PATH", "/nowhere/libtiny.so.1")
    yield import_text("cudabind_test_tiny")
    _load._opened.pop("tiny", None)
    del sys.modules["cudabind_test_tiny"]


@pytest.fixture
def tiny(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, and version 2.1 of its library."""
    monkeypatch.setenv("CUDABIND_TINY_PATH", str(build(tmp_path, 2010)))
    return module
