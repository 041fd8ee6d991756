"""The binding machinery with a library of our own: what a signature becomes, which version counts, and races for it."""

from __future__ import annotations

import ctypes
import inspect
import pickle
import pydoc
import shutil
import subprocess
import sys
import threading
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cudabind
from cudabind import _bind, _load
from cudabind.errors import CudaError, LibraryNotFound, SymbolNotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize("name", ["tinyDo", "tinyAdd", "tinyText", "tinyNothing", "tinyFill"])
@pytest.mark.parametrize("way", ["checked", "unchecked"])
def test_arguments_beyond_those_declared_are_refused(tiny: ModuleType, name: str, way: str) -> None:
    function = getattr(tiny, name)
    good = {"tinyDo": (0,), "tinyAdd": (1, 2), "tinyText": (3,), "tinyNothing": (), "tinyFill": (None, None)}[name]
    call = function if way == "checked" else function.unchecked
    for arguments in ((*good, 1), (*good, None), (*good, *good, 1, 2, 3)):
        with pytest.raises(TypeError, match=rf"takes {len(good)} argument.*\({len(arguments)} given\)"):
            call(*arguments)
    call(*good)
    if good:
        with pytest.raises(TypeError, match="argument"):
            call(*good[1:])


@pytest.mark.parametrize("place", [0, 1], ids=["Mem", "void_p"])
def test_what_python_shares_is_no_memory_to_write_to(tiny: ModuleType, place: int) -> None:
    data, text = bytes(range(8)), "abcdefgh"
    wrapped = (ctypes.c_char_p(data), ctypes.c_wchar_p(text))
    for given in (data, text, "", b"", type("Mine", (bytes,), {})(b"abcdefgh"), *wrapped):
        arguments: list[object] = [None, None]
        arguments[place] = given
        for _ in range(2):  # the first call binds
            with pytest.raises(ctypes.ArgumentError, match="is no memory that a library may write to"):
                tiny.tinyFill(*arguments)
    assert (data, text) == (bytes(range(8)), "abcdefgh")


@pytest.mark.parametrize("place", [0, 1], ids=["Mem", "void_p"])
def test_memory_is_given_in_every_way_that_ctypes_has(tiny: ModuleType, place: int) -> None:
    number, array = ctypes.c_int32(), (ctypes.c_int32 * 2)()
    ways: list[tuple[Any, tuple[Any, ...]]] = [
        (number, (ctypes.byref(number), ctypes.pointer(number), ctypes.addressof(number))),
        (array, (array, ctypes.c_void_p(ctypes.addressof(array)))),
    ]
    for target, given in ways:
        for way in given:
            ctypes.memset(ctypes.byref(target), 0, 4)
            arguments: list[object] = [None, None]
            arguments[place] = way
            tiny.tinyFill(*arguments)
            assert ctypes.c_int32.from_buffer(target).value == 7
    for wrong, name in ((1.5, "float"), (ctypes.c_int32(), "c_int"), ([1], "list")):
        with pytest.raises(
            ctypes.ArgumentError, match=rf"argument 1: TypeError: {name} is no address; pass one, byref"
        ):
            tiny.tinyFill(wrong, None)


def test_what_is_only_read_may_be_bytes(tiny: ModuleType) -> None:
    assert tiny.tinyLook(b"\x05\0\0\0", b"\x02") == tiny.tinyLook(ctypes.byref(ctypes.c_int32(5)), b"\x02") == 7


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tinyAdd", (2**63, 0)),
        ("tinyAdd", (-(2**63) - 1, 0)),
        ("tinyAdd", (0, 2**31)),
        ("tinyAdd", (0, -(2**31) - 1)),
        ("tinyAdd", (np.uint64(2**63), 0)),
        ("tinyAdd", (0, np.int64(2**32 + 1))),
        ("tinyAdd", (0, SimpleNamespace(_as_parameter_=2**32 + 1))),
        ("tinyAdd", (10**40, 0)),
        ("tinyDo", (2**32,)),
        ("tinyText", (2**32 + 3,)),
        ("tinyText", (-(2**31) - 1,)),
        ("tinySize", (-1, 0)),
        ("tinySize", (2**64 + 5, 0)),
        ("tinySize", (0, -1)),
        ("tinySize", (0, 2**8)),
    ],
)
def test_an_integer_that_its_type_cannot_hold_is_refused(
    tiny: ModuleType, name: str, arguments: tuple[object, ...]
) -> None:
    for _ in range(2):  # the first call binds
        with pytest.raises(ctypes.ArgumentError, match=r"OverflowError: -?\d+ is not between -?\d+ and \d+"):
            getattr(tiny, name)(*arguments)


def test_integers_are_given_in_every_way_up_to_the_ends_of_their_types(tiny: ModuleType) -> None:
    for kind, low, high in ((ctypes.c_int64, -(2**63), 2**63 - 1), (ctypes.c_int32, -(2**31), 2**31 - 1)):
        for number in (low, -1, 0, high):
            ways = (number, kind(number), np.int64(number), SimpleNamespace(_as_parameter_=number))
            for given in ways:
                arguments = (given, 0) if kind is ctypes.c_int64 else (0, given)
                assert tiny.tinyAdd(*arguments) == number
    for number in (0, 2**31, 2**32 - 1, 2**64 - 256):
        assert tiny.tinySize(number, 255) == tiny.tinySize(ctypes.c_size_t(number), True) + 254 == number + 255
    assert tiny.tinyText(tiny.tinyStatus.TINY_BAD) == tiny.tinyText(3) == "it is three"
    assert tiny.tinyText(2**32 - 1) is tiny.tinyText(-1) is None  # an enum may be signed or not, as its members want
    for wrong in (1.0, "1", b"1", None, [1], np.float64(1), np.arange(2), ctypes.c_double(1), ctypes.c_int16(1)):
        for arguments in ((wrong, 0), (0, wrong)):
            with pytest.raises(ctypes.ArgumentError, match="TypeError"):
                tiny.tinyAdd(*arguments)


@pytest.mark.parametrize("way", ["checked", "unchecked"])
def test_a_handle_is_a_handle_a_number_or_nothing(tiny: ModuleType, way: str) -> None:
    read = tiny.tinyRead if way == "checked" else tiny.tinyRead.unchecked
    assert read(tiny.tinyConst_t(64)) == read(tiny.tinyObject_t(64)) == read(64) == 64
    assert read(None) is None
    array = (ctypes.c_int32 * 2)()
    for wrong in (b"abc", "abc", 1.5, ctypes.c_void_p(64), array, ctypes.byref(array), ctypes.c_char_p(b"abc"), [64]):
        with pytest.raises(ctypes.ArgumentError):
            read(wrong)


def test_a_missing_symbol_raises_at_the_call_and_says_what_to_install(tiny: ModuleType) -> None:
    with pytest.raises(SymbolNotFound) as caught:
        tiny.tinyGone()
    assert caught.value.function == "tinyGone"
    for part in ("tiny 2.1", "libtiny.so.1", "pip install tiny"):
        assert part in str(caught.value)


def test_a_function_that_is_newer_than_the_library_says_both_versions(tiny: ModuleType) -> None:
    with pytest.raises(SymbolNotFound, match=r"tinyLate: needs tiny 3\.1 or newer, installed is 2\.1 \(/.*libtiny"):
        tiny.tinyLate()


def test_a_function_that_was_removed_says_both_versions(tiny: ModuleType) -> None:
    with pytest.raises(SymbolNotFound, match=r"tinyGoneForGood: needs tiny 1\.4 or older, installed is 2\.1"):
        tiny.tinyGoneForGood()


def test_a_module_tells_which_functions_a_version_has(module: ModuleType) -> None:
    everywhere = {"tinyDo", "tinyAdd", "tinyText", "tinyNothing", "tinySum", "tinyEach", "tinyRead", "tinyOnce"}
    everywhere |= {"tinyFill", "tinyLook", "tinySize", "tinyCopyInt", "tinyCopyLong", "tinyName"}
    assert _bind.expected(module, "1.2") == everywhere | {"tinyGoneForGood"}
    assert _bind.expected(module, "2.1") == everywhere
    assert _bind.expected(module, "3.10") == everywhere | {"tinyLate"}


def test_a_missing_library_raises_at_the_call(module: ModuleType) -> None:
    with pytest.raises(LibraryNotFound, match="/nowhere"):
        module.tinyDo(0)


def test_a_function_keeps_its_name_and_knows_its_library(tiny: ModuleType) -> None:
    assert repr(tiny.tinyDo) == "<tiny function tinyDo>"
    assert {"tinyDo", "tinySum", "tinyGone"} <= set(_bind.symbols(tiny))
    assert "tinyStatus" not in _bind.symbols(tiny)
    with pytest.raises(AttributeError, match="has no attribute 'uncheked'"):
        tiny.tinyDo.uncheked  # noqa: B018 - reading it is the test


def test_a_function_with_another_symbol_in_old_libraries_is_bound_to_that(tiny: ModuleType) -> None:
    assert tiny.tinyOnce() == 2


def test_the_functions_of_a_family_have_types_of_their_own(tiny: ModuleType) -> None:
    for name, kind in (("tinyCopyInt", ctypes.c_int32), ("tinyCopyLong", ctypes.c_int64), ("tinyCopy", ctypes.c_int32)):
        numbers, copied = (kind * 3)(1, 2, 3), (kind * 3)()
        assert getattr(tiny, name)(numbers, copied, 3) is None
        assert list(copied) == [1, 2, 3]
        assert getattr(tiny, name).unchecked.argtypes == (ctypes.c_void_p, ctypes.c_void_p, kind)
    assert (tiny.tinyName(0), tiny.tinyName.unchecked(0), tiny.tinyText(3)) == ("a name", b"a name", "it is three")
    assert tiny.tinyCopy is tiny.tinyCopyInt
    with pytest.raises(ctypes.ArgumentError, match=r"OverflowError: 2147483648 is not between"):
        tiny.tinyCopyInt(None, None, 2**31)
    with pytest.raises(TypeError, match=r"takes 3 arguments \(2 given\)"):
        tiny.tinyCopyInt(None, None)


def test_a_function_of_a_family_is_made_at_first_use(module: ModuleType) -> None:
    assert {"tinyCopyInt", "tinyCopy", "tinyText"} <= set(dir(module)) - vars(module).keys()
    assert "_Copy" not in dir(module)
    assert len(set(map(id, race(lambda: module.tinyCopyInt)))) == 1
    assert repr(module.tinyCopy) == "<tiny function tinyCopyInt>"
    assert str(inspect.signature(module.tinyCopyLong)) == (
        "(from_: 'ConstMem[c_int64]', to: 'Mem[c_int64]', count: 'int64_t', /) -> 'tinyStatus'"
    )
    assert "tinyCopyLong(from_: 'ConstMem[c_int64]'" in pydoc.plain(pydoc.render_doc(module.tinyCopyLong))
    assert "tinyDo(status: 'int32_t', /)" in pydoc.plain(pydoc.render_doc(module.tinyDo))


def race(work: Callable[[], object], count: int = 16) -> list[object]:
    """What each of many threads got that start at once and are switched as often as can be."""
    start = threading.Barrier(count)
    got: list[object] = []

    def run() -> None:
        start.wait()
        got.append(work())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(got) == count
    return got


def test_threads_that_race_to_bind_get_one_and_the_same_function(tiny: ModuleType) -> None:
    def bind() -> object:
        assert tiny.tinyAdd(1, 1) == 2
        return tiny.tinyAdd.unchecked

    assert len(set(map(id, race(bind)))) == 1


@pytest.mark.parametrize("name", ["tinyDo", "tinyAdd"])
def test_a_finalizer_that_comes_in_as_a_function_is_bound_may_bind_another_and_the_same(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[object] = []

    def collected(hint: object) -> Any:
        if not seen:
            seen.append(None)
            seen.append(getattr(tiny, name).unchecked)
        return argument(hint)

    argument = _bind.argument
    monkeypatch.setattr(_bind, "argument", collected)
    thread = threading.Thread(target=lambda: seen.append(tiny.tinyAdd(1, 1)), daemon=True)
    thread.start()
    thread.join(120)  # it may wait for itself for ever
    assert seen[2:] == [2]
    assert getattr(tiny, name).unchecked is seen[1]


@pytest.mark.parametrize("name", ["tinyMode", "tinyBox", "tinyObject_t", "tinyEach_t"])
def test_threads_that_race_for_a_type_get_one_and_the_same(tiny: ModuleType, name: str) -> None:
    assert len(set(map(id, race(lambda: getattr(tiny, name))))) == 1


def test_threads_may_race_for_types_and_functions_that_need_them(tiny: ModuleType) -> None:
    """The two take their locks one inside the other: it must be the same way round for all."""
    names = iter(["tinyBox", "tinyPair", "tinySum"] * 8)

    def use() -> object:
        used = getattr(tiny, next(names))
        return used.unchecked if used is tiny.tinySum else used

    assert len(set(map(id, race(use, 24)))) == 3
    assert tiny.tinySum(tiny.tinyPair(x=1.5, n=2)) == 3.5


def test_an_enum_argument_is_an_int_for_ctypes_and_needs_no_enum(tiny: ModuleType) -> None:
    assert tiny.tinyText.unchecked.argtypes == (ctypes.c_int,)
    assert "tinyStatus" not in vars(tiny)
    assert issubclass(tiny.tinyStatus, IntEnum)
    assert "tinyStatus" in vars(tiny)


def test_types_are_made_when_they_are_used_and_stay(module: ModuleType) -> None:
    assert not {"tinyStatus", "tinyPair", "tinyObject_t"} & vars(module).keys()
    assert {"tinyStatus", "tinyPair", "tinyObject_t", "TINY_KIND", "tinyDo"} <= set(dir(module))
    assert module.tinyPair is module.tinyPair
    assert module.tinyStatus.TINY_BAD is module.tinyStatus(3)
    assert (
        module.tinyPair.__module__ == module.tinyStatus.__module__ == module.tinyObject_t.__module__ == module.__name__
    )
    with pytest.raises(AttributeError, match="'cudabind_test_tiny' has no attribute 'tinyStatu'"):
        module.tinyStatu  # noqa: B018 - reading it is the test


def test_an_enumerator_survives_pickling(module: ModuleType) -> None:
    assert pickle.loads(pickle.dumps(module.tinyStatus.TINY_BAD)) is module.tinyStatus.TINY_BAD


def test_an_alias_is_the_type_itself(module: ModuleType) -> None:
    assert module.tinyMode_t is module.tinyMode


def test_a_handle_is_taken_where_a_const_one_is_and_not_the_other_way_round(tiny: ModuleType) -> None:
    assert tiny.tinyRead(tiny.tinyObject_t(5)) == 5
    assert not issubclass(tiny.tinyConst_t, tiny.tinyObject_t)
    with pytest.raises(ctypes.ArgumentError):
        tiny.tinyRead(ctypes.c_void_p(5))


def test_a_callback_has_the_types_of_its_call(tiny: ModuleType) -> None:
    assert tiny.tinyEach(4, tiny.tinyEach_t(lambda index, user: index * user), 10) == 60


def test_a_variable_is_the_librarys_own(tiny: ModuleType) -> None:
    kind = tiny.TINY_KIND
    assert type(kind) is tiny.tinyConst_t
    assert kind.value == ctypes.addressof(kind)  # it holds its own address
    assert tiny.TINY_KIND is kind


@pytest.mark.parametrize(
    ("version", "fields", "count", "number"),
    [
        (1040, ["pair"], 2, 2100),
        (2010, ["one"], 2, 2100),
        (3000, ["one", "two"], 3, 3100),
        (10000, ["one", "two"], 3, 3100),
    ],
)
def test_what_differs_goes_by_the_library_that_is_loaded(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int,
    fields: list[str],
    count: int,
    number: int,
) -> None:
    monkeypatch.setenv("CUDABIND_TINY_PATH", str(build(tmp_path, version)))
    assert [name for name, *_ in module.tinyBox._fields_] == fields
    values = module.tinyMode.TINY_COUNT, module.TINY_VERSION
    assert values == (count, number)
    assert "tinyBox" in vars(module)


def test_without_a_library_the_newest_counts_until_one_is_loaded(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ctypes.sizeof(module.tinyBox) == 16
    assert module.tinyBox is module.tinyBox
    assert module.tinyMode_t.TINY_COUNT == 3
    monkeypatch.setenv("CUDABIND_TINY_PATH", str(build(tmp_path, 2010)))
    module.tinyDo(0)
    assert ctypes.sizeof(module.tinyBox) == 8
    assert module.tinyMode_t.TINY_COUNT == 2
    assert module.tinyMode is module.tinyMode_t
