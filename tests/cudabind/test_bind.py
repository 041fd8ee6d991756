"""The binding machinery with a library of our own: what a signature becomes, and what is refused of arguments."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudabind import _bind
from cudabind.errors import CudaError, LibraryNotFound, SymbolNotFound

spec = importlib.util.spec_from_file_location("tiny_library", Path(__file__).with_name("tiny_library.py"))
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
module, tiny = library.module, library.tiny


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
            with pytest.raises(ctypes.ArgumentError, match="is not writable memory"):
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
            ctypes.ArgumentError, match=rf"argument 1: TypeError: {name} is not an address; pass one: byref"
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
