"""Python functions that libraries call: kept alive, exceptions carried, on any thread; with a library of our own."""

from __future__ import annotations

import ctypes
import gc
import shutil
import subprocess
import sys
import threading
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

import cudabind
from cudabind import _load, callbacks
from cudabind.callbacks import ReleasedCallback, function_type, raise_pending, release
from cudabind.errors import CudaError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCE = """
#include <pthread.h>
#include <stddef.h>
typedef int (*each)(int, void *);
typedef struct { each made; void *user; } layer;
typedef struct { int status; int more; } both;
static each kept; static layer copied;
int ringVersion(int *value) { *value = 1000; return 0; }
int ringKeep(each function) { kept = function; return 0; }
int ringRun(int n) { int i, bad = 0; for (i = 0; i < n && kept; i++) bad |= kept(i, NULL) < 0; return bad ? 3 : 0; }
both ringBoth(void) { both made = {0, 0}; if (kept) kept(0, NULL); return made; }
int ringQuiet(int n) { int i; for (i = 0; i < n; i++) kept(i, NULL); return 0; }
int ringLayer(const layer *given) { copied = *given; return 0; }
int ringCall(int n) { return copied.made ? copied.made(n, copied.user) : -5; }
static void *run(void *n) { kept(*(int *)n, NULL); return NULL; }
int ringThread(int n) { pthread_t t; pthread_create(&t, NULL, run, &n); pthread_join(t, NULL); return 0; }
"""

MODULE = """
from __future__ import annotations
from ctypes import c_int32
from cudabind._bind import SysLibrary
from cudabind._lazy import Callback, IntEnum, Structure, lazy
from cudabind._types import Ptr, address, int32_t, void_p
from cudabind.errors import CudaError

SINCE: dict[str, str] = {}
UNTIL: dict[str, str] = {}

class ringStatus(IntEnum):
    RING_OK = 0
    RING_BAD = 3

class ringEach_t(Callback):
    def __call__(self, index: int32_t, user: void_p, /) -> int32_t: ...

class ringLayer_t(Structure):
    made: ringEach_t
    user: address

class ringBoth_t(Structure):
    status: int32_t
    more: int32_t

_lib = SysLibrary("ring", "ringStatus", CudaError, "")
_both = SysLibrary("ring", "ringStatus", CudaError, "", "ringBoth_t")

@_lib.status
def ringKeep(function: ringEach_t, /) -> ringStatus: ...
@_lib.status
def ringRun(n: int32_t, /) -> ringStatus: ...
@_both.status
def ringBoth() -> ringBoth_t: ...
@_lib.status
def ringQuiet(n: int32_t, /) -> ringStatus: ...
@_lib.status
def ringLayer(given: Ptr[ringLayer_t], /) -> ringStatus: ...
@_lib.value
def ringCall(n: int32_t, /) -> int32_t: ...
@_lib.status
def ringThread(n: int32_t, /) -> ringStatus: ...

_names = lazy(globals())
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("ring")
    source, library = folder / "ring.c", folder / "libring.so.1"
    source.write_text(SOURCE)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-lpthread"], check=True)
    return library


@pytest.fixture
def ring(built: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    row = cudabind.Library("ring", "ring", "libring.so.1", "ringVersion", "thousands", "pip install ring")
    monkeypatch.setitem(cudabind.LIBRARIES, "ring", row)
    monkeypatch.setenv("CUDABIND_RING_PATH", str(built))
    module = ModuleType("cudabind_test_ring")
    monkeypatch.setitem(sys.modules, "cudabind_test_ring", module)
    exec(MODULE, vars(module))
    yield module
    module.ringKeep(None)
    _load._opened.pop("ring", None)
    assert not callbacks.pending


class Mine(Exception):
    """What no library and no part of this project raises."""


def fail(index: int, _user: object) -> int:
    raise Mine(index)


# -- how long a function lives --------------------------------------------------------------------------------------
def test_a_function_given_as_it_is_lives_on_without_its_owner(ring: Any) -> None:
    seen: list[int] = []
    ring.ringKeep(lambda index, _user: seen.append(index) or 0)
    gc.collect()
    ring.ringRun(3)
    assert seen == [0, 1, 2]


def test_a_callback_that_was_made_before_lives_on_once_it_was_given(ring: Any) -> None:
    seen: list[int] = []
    ring.ringKeep(ring.ringEach_t(lambda index, _user: seen.append(index) or 0))
    gc.collect()
    ring.ringRun(2)
    assert seen == [0, 1]


def test_a_field_of_a_struct_takes_a_function_which_outlives_the_struct(ring: Any) -> None:
    ring.ringLayer(ring.ringLayer_t(made=lambda index, user: index * (user or 1), user=7))
    gc.collect()
    assert ring.ringCall(6) == 42
    later = ring.ringLayer_t()
    later.made = lambda index, _user: index + 1
    ring.ringLayer(later)
    assert ring.ringCall(6) == 7
    later.made = None
    ring.ringLayer(later)
    assert ring.ringCall(6) == -5
    with pytest.raises(TypeError, match="int is not a ringEach_t; pass a Python function"):
        later.made = 5


def test_the_same_function_given_again_is_no_second_callback(ring: Any) -> None:
    class Counter:
        def each(self, _index: int, _user: object) -> int:
            return 0

    counter = Counter()
    before = len(callbacks._kept)
    for _ in range(50):
        ring.ringKeep(counter.each)  # each time another object of the same method
    assert len(callbacks._kept) == before + 1
    release(counter.each)
    alive = weakref.ref(counter)
    del counter
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("made", [False, True])
def test_a_released_function_is_let_go_and_a_late_call_says_so(ring: Any, made: bool) -> None:
    def each(_index: int, _user: object) -> int:
        return 0

    given = ring.ringEach_t(each) if made else each
    ring.ringKeep(given)
    release(given)
    with pytest.raises(ValueError, match="or has been released"):
        release(given)
    alive = weakref.ref(each)
    del each, given
    gc.collect()
    assert alive() is None
    with pytest.raises(ReleasedCallback, match="passed as ringEach_t"):
        ring.ringRun(1)


def test_what_was_never_given_cannot_be_released() -> None:
    with pytest.raises(ValueError, match="was not passed to a library"):
        release(print)


def test_a_callback_of_another_type_a_number_and_a_text_are_refused(ring: Any) -> None:
    for wrong in (function_type(None)(print), 5, "text"):
        with pytest.raises(ctypes.ArgumentError, match=r"is not a ringEach_t; pass a Python function"):
            ring.ringKeep(wrong)


# -- what is raised -------------------------------------------------------------------------------------------------
def test_an_exception_is_raised_by_the_call_during_which_it_was_raised(ring: Any, capfd: Any) -> None:
    ring.ringKeep(fail)
    with pytest.raises(Mine) as caught:
        ring.ringQuiet(1)  # which itself says that all is well
    assert caught.value.args == (0,)
    assert any(entry.name == "fail" for entry in caught.traceback)
    ring.ringKeep(None)
    assert ring.ringRun(1) is None
    assert capfd.readouterr().err == ""


def test_all_of_a_call_are_raised_with_its_own_failure_behind_them(ring: Any) -> None:
    ring.ringKeep(fail)
    with pytest.raises(Mine) as caught:
        ring.ringRun(3)  # which fails, for it was told -1
    chain: list[BaseException] = [caught.value]
    while (following := chain[-1].__context__) is not None:
        chain.append(following)
    assert [error.args for error in chain[:3]] == [(0,), (1,), (2,)]
    assert isinstance(chain[3], CudaError)
    assert chain[3].name == "RING_BAD"


def test_a_function_that_returns_its_status_in_a_struct_raises_it_too(ring: Any) -> None:
    assert ring.ringBoth() is None
    ring.ringKeep(fail)
    with pytest.raises(Mine):
        ring.ringBoth()


def test_an_unchecked_call_leaves_it_to_the_next_checked_one_or_to_raise_pending(ring: Any) -> None:
    ring.ringKeep(fail)
    assert ring.ringQuiet.unchecked(1) == 0
    with pytest.raises(Mine):
        ring.ringKeep(None)
    ring.ringKeep(fail)
    assert ring.ringRun.unchecked(1) == 3
    with pytest.raises(Mine):
        raise_pending()
    assert raise_pending() is None


def test_a_result_that_the_library_cannot_take_is_an_error_and_no_success(ring: Any) -> None:
    ring.ringKeep(lambda _index, _user: None)
    with pytest.raises(TypeError, match=r"passed as ringEach_t returned None; the library expects c_int"):
        ring.ringRun(1)


def test_an_interrupt_in_a_callback_ends_the_program_as_elsewhere(ring: Any) -> None:
    def interrupted(_index: int, _user: object) -> int:
        raise KeyboardInterrupt

    ring.ringKeep(interrupted)
    with pytest.raises(KeyboardInterrupt):
        ring.ringRun(1)


# -- threads --------------------------------------------------------------------------------------------------------
def test_a_thread_of_the_librarys_own_calls_and_its_exception_reaches_who_calls(ring: Any) -> None:
    seen: list[int] = []
    ring.ringKeep(lambda _index, _user: seen.append(threading.get_ident()) or 0)
    ring.ringThread(1)
    assert seen != [threading.get_ident()]
    ring.ringKeep(fail)
    with pytest.raises(Mine):
        ring.ringThread(1)


def test_an_exception_of_one_thread_is_not_raised_in_another(ring: Any) -> None:
    ring.ringKeep(fail)
    raised, looked = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def work() -> None:
        ring.ringQuiet.unchecked(1)
        raised.set()
        looked.wait(60)
        try:
            ring.ringKeep(None)
        except Mine as error:
            caught.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    assert raised.wait(60)
    assert ring.ringKeep(fail) is None  # this thread's calls go on
    looked.set()
    worker.join()
    assert len(caught) == 1


def test_what_nobody_was_told_of_is_printed_at_the_end(built: Path) -> None:
    program = f"""
import ctypes
from cudabind.callbacks import function_type
def fail():
    raise OSError("nobody was told")
library = ctypes.CDLL({str(built)!r})
callback = function_type(ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(lambda *_: fail())
library.ringKeep(ctypes.c_void_p(callback.address))
del callback
library.ringQuiet(1)
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "went on\n"
    assert "nobody was told" in done.stderr


def test_a_threading_layer_of_cudss_is_a_struct_of_functions() -> None:
    """As cuDSS would call it: a loop over tasks, each by the function that it passes."""
    from cudabind.sys import cudss

    done: list[int] = []

    def parallel_for(_threads: int, tasks: int, context: int | None, function: int) -> None:
        run = cudss.cudss_thr_func_t(function)
        for task in range(tasks):
            run(task, context)

    layer: Any = cudss.cudssThreadingInterface_t(cudssGetMaxThreads=lambda: 4, cudssParallelFor=parallel_for)
    assert layer.cudssGetMaxThreads() == 4
    each = cudss.cudss_thr_func_t(lambda task, _context: done.append(task))
    layer.cudssParallelFor(4, 3, None, each.address)
    assert done == [0, 1, 2]
