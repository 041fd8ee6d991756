"""Functions and types of a binding are made at first use, once, by the version of the library that is loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import pickle
import pydoc
import sys
import threading
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cudabind import _bind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

spec = importlib.util.spec_from_file_location("tiny_library", Path(__file__).with_name("tiny_library.py"))
library = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
build, module, tiny = library.build, library.module, library.tiny


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
