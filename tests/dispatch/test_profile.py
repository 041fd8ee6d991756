"""`dispatch.trace.profile`: over a stand-in of CUPTI that is given the bytes of records, as a real one writes them."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import threading
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import dispatch as dp
from cudabind import _load
from cudabind.errors import CuptiError
from cudabind.sys import cupti
from dispatch.errors import DeviceUnavailable
from dispatch.execute import launches
from dispatch.execute.launches import Launches
from dispatch.supervise import profile as module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# It asks for a buffer on a thread of its own, as CUPTI may, fills it, and hands it back when it is full or flushed.
SOURCE = """
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef void (*ask)(uint8_t **, size_t *, size_t *);
typedef void (*give)(void *, uint32_t, uint8_t *, size_t, size_t);
static ask wanted; static give done; static int subscribed, enabled[64], version = 130000, refuse;
static uint8_t *buffer; static size_t size, used, most;
int cuptiGetVersion(uint32_t *v) { *v = version; return 0; }
int cuptiGetResultString(int s, const char **t) { *t = "the stand-in's words"; return 0; }
int cuptiSubscribe(void **s, void *f, void *u) {
  if (!f || refuse == 1) return refuse ? 39 : 1;
  if (subscribed) return 39; subscribed = 1; *s = &subscribed; return 0; }
int cuptiUnsubscribe(void *s) { subscribed = 0; return s == &subscribed ? 0 : 1; }
int cuptiActivityRegisterCallbacks(ask a, give g) { wanted = a; done = g; return a && g ? 0 : 1; }
int cuptiActivityEnable(int k) { if (refuse == 2 && k == 2) return 35; enabled[k] = 1; return 0; }
int cuptiActivityDisable(int k) { enabled[k] = 0; return 0; }
static void *back(void *n) { if (buffer) done(NULL, 0, buffer, size, used); buffer = NULL; used = 0; return NULL; }
static void *next(void *n) { wanted(&buffer, &size, &most); return NULL; }
static void elsewhere(void *(*f)(void *)) { pthread_t t; pthread_create(&t, NULL, f, NULL); pthread_join(t, NULL); }
int cuptiActivityFlushAll(uint32_t flag) { elsewhere(back); return 0; }
int cuptiActivityGetNumDroppedRecords(void *c, uint32_t s, size_t *n) { *n = refuse == 3 ? 7 : 0; return 0; }
int standInState(void) { int i, n = subscribed; for (i = 0; i < 64; i++) n += 100 * enabled[i]; return n; }
void standInSet(int v, int r) { version = v; refuse = r; }
void standInWrite(const void *record, size_t bytes) {
  if (!enabled[*(const uint32_t *)record]) return;
  if (buffer && used + bytes > size) elsewhere(back);
  if (!buffer) elsewhere(next);
  memcpy(buffer + used, record, bytes); used += bytes; }
static size_t length(const uint8_t *r) { return *(uint32_t *)r == 10 ? KERNEL : *(uint32_t *)r == 2 ? 88 : 96; }
int cuptiActivityGetNextRecord(uint8_t *b, size_t valid, uint8_t **record) {
  uint8_t *at = *record ? *record + length(*record) : b;
  if (at >= b + valid) return 12; *record = at; return 0; }
"""
KERNEL = cupti.CUpti_ActivityKernel10
NAMES = {name: ctypes.create_string_buffer(name) for name in (b"nvjet_gemm", b"_Z5saxpyifPfS_")}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("cupti")
    source, made = folder / "cupti.c", folder / "libcupti.so.13"
    source.write_text(SOURCE)
    size = f"-DKERNEL={ctypes.sizeof(KERNEL)}"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", size, "-o", made, source, "-lpthread"], check=True)
    return made


@pytest.fixture
def stand_in(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in in place of the library, and a host in place of the GPU."""
    monkeypatch.setenv("CUDABIND_CUPTI_PATH", str(library))
    monkeypatch.setattr(_load, "_opened", {k: v for k, v in _load._opened.items() if k != "cupti"})
    unbind()
    host = dp.device("host")
    monkeypatch.setattr(module, "device", lambda _name: host)
    made = ctypes.CDLL(str(library))
    made.standInSet(130000, 0)
    yield made
    made.standInSet(130000, 0)
    unbind()


def unbind() -> None:
    """Have CUPTI's functions look for their library anew."""
    for function in vars(cupti).values():
        if getattr(function, "_bare", None) is not None:
            function._call(function._bind_and_call)
            function._bare = None
            function.__dict__.pop("unchecked", None)


@pytest.fixture
def launch(stand_in: Any) -> Callable[..., None]:
    """Has the stand-in write a kernel's record."""

    def write(name: bytes, start: int, end: int, stream: int = 7, **more: int) -> None:
        record = KERNEL(kind=10, start=start, end=end, streamId=stream, correlationId=3, gridX=4, gridY=2, gridZ=1)
        record.blockX, record.blockY, record.blockZ, record.registersPerThread = 128, 1, 1, 40
        record.staticSharedMemory, record.dynamicSharedMemory = 16, 1024
        record.name = ctypes.addressof(NAMES[name])
        for key, value in more.items():
            setattr(record, key, value)
        stand_in.standInWrite(ctypes.byref(record), ctypes.c_size_t(ctypes.sizeof(record)))

    return write


def copy(stand_in: Any, size: int, start: int, end: int) -> None:
    record = cupti.CUpti_ActivityMemcpy6(kind=1, copyKind=1, bytes=size, start=start, end=end, streamId=9)
    stand_in.standInWrite(ctypes.byref(record), ctypes.c_size_t(ctypes.sizeof(record)))


def test_what_a_block_had_the_gpu_do_is_listed_in_its_order(stand_in: Any, launch: Callable[..., None]) -> None:
    launch(b"nvjet_gemm", 1, 2)  # before: it is not of the block
    with dp.trace.profile() as found:
        launch(b"nvjet_gemm", 5_000, 9_500)
        launch(b"_Z5saxpyifPfS_", 2_000, 3_000, stream=8, graphNodeId=11)
        copy(stand_in, 4096, 1_000, 1_500)
        record = cupti.CUpti_ActivityMemset4(kind=2, bytes=256, start=10_000, end=10_100, streamId=7)
        stand_in.standInWrite(ctypes.byref(record), ctypes.c_size_t(ctypes.sizeof(record)))
    launch(b"nvjet_gemm", 20_000, 21_000)  # after it
    assert [(each.kind, each.name, each.start, each.stream) for each in found.activities] == [
        ("memcpy", "memcpy HTOD", 1_000, 9),
        ("kernel", "saxpy(int, float, float*, float*)", 2_000, 8),
        ("kernel", "nvjet_gemm", 5_000, 7),
        ("memset", "memset", 10_000, 7),
    ]
    copied, saxpy, gemm, _ = found.activities
    assert (copied.bytes, copied.grid, saxpy.graph_node, gemm.graph_node) == (4096, None, 11, 0)
    assert (gemm.grid, gemm.block, gemm.shared_bytes, gemm.registers) == ((4, 2, 1), (128, 1, 1), 1040, 40)
    assert (gemm.microseconds, len(found.kernels), found.dropped) == (4.5, 2, 0)
    assert stand_in.standInState() == 0  # nothing is enabled, and CUPTI is free for others


def test_the_tables_and_the_trace_say_what_was_found(
    stand_in: Any, launch: Callable[..., None], tmp_path: Path
) -> None:
    with dp.trace.profile() as found:
        for start in (1_000, 5_000):
            launch(b"nvjet_gemm", start, start + 3_000)
        copy(stand_in, 2_000_000, 9_000, 11_000)
    assert str(found).splitlines()[1].split() == ["2", "6.0", "3.00", "75.0%", "nvjet_gemm"]
    assert str(found).splitlines()[-1].split() == ["3", "8.0", "in", "all"]
    assert found.table().splitlines()[1].split() == ["0.0", "3.00", "7", "4x2x1", "128x1x1", "nvjet_gemm"]
    assert found.table().splitlines()[3].split() == ["8.0", "2.00", "9", "2,000,000", "memcpy", "HTOD"]
    found.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in drawn] == [
        ("nvjet_gemm", 1.0, 3.0, 7), ("nvjet_gemm", 5.0, 3.0, 7), ("memcpy HTOD", 9.0, 2.0, 9),
    ]  # fmt: skip
    assert drawn[0]["args"]["grid"] == [4, 2, 1]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"GPU 0", "stream 7", "stream 9"}


def test_more_than_one_buffer_is_filled_and_nothing_is_lost(
    launch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispatch.libraries.cupti import activities

    monkeypatch.setattr(activities, "BUFFER_BYTES", 3 * ctypes.sizeof(KERNEL) + 8)
    with dp.trace.profile() as found:
        for start in range(1, 21):
            launch(b"nvjet_gemm", start, start + 1)
    assert [each.start for each in found.activities] == list(range(1, 21))
    assert not activities._buffers.lent


def test_a_second_profile_and_another_profiler_are_refused(stand_in: Any, launch: Callable[..., None]) -> None:
    with dp.trace.profile() as found:
        with pytest.raises(DeviceUnavailable, match="another profile"), dp.trace.profile():
            pass
        launch(b"nvjet_gemm", 1, 2)
    assert len(found.activities) == 1
    stand_in.standInSet(130000, 1)
    with pytest.raises(DeviceUnavailable, match="another profiler uses CUPTI in this process") as caught, (
        dp.trace.profile()
    ):  # fmt: skip
        pass
    assert isinstance(caught.value.__cause__, CuptiError)
    stand_in.standInSet(130000, 2)
    with pytest.raises(CuptiError, match="CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"), dp.trace.profile():
        pass
    assert stand_in.standInState() == 0
    stand_in.standInSet(130000, 3)
    with dp.trace.profile() as found:
        pass
    assert found.dropped == 7
    assert "7 more did not fit into the buffers" in str(found)


def test_a_block_that_fails_says_so_and_leaves_cupti_free(stand_in: Any, launch: Callable[..., None]) -> None:
    found = dp.trace.profile()
    with pytest.raises(KeyError, match="of the block"), found:
        launch(b"of the block", 1, 2)  # of which there is no name
    assert found.activities == ()
    assert stand_in.standInState() == 0


def test_kernels_of_another_thread_are_listed(launch: Callable[..., None]) -> None:
    with dp.trace.profile() as found:
        thread = threading.Thread(target=launch, args=(b"nvjet_gemm", 4, 6))
        thread.start()
        thread.join()
    assert len(found.kernels) == 1


@pytest.mark.usefixtures("stand_in")
def test_no_launch_of_a_graph_holds_the_interpreters_lock_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUPTI's thread may want it for a callback, while the launch waits for that thread."""
    held: list[bool] = []
    monkeypatch.setattr(launches, "launcher", lambda *_, holds_gil: lambda: held.append(holds_gil) or 0)
    monkeypatch.setattr(Launches, "used", weakref.WeakSet())
    stream: Any = SimpleNamespace(external=False, context=None)
    before, target = Launches(stream, ctypes.c_void_p()), ctypes.c_void_p()
    launch = before.of(target, 1, holds_gil=False)
    launch()
    with dp.trace.profile():
        launch()
        Launches(stream, target).of(target, 1, holds_gil=False)()
        launch()
    assert held == [True, False, False, False]
    assert not Launches.observed
    assert before.left <= 0  # from here on it finds out by itself whether there is room


def test_without_a_gpu_or_without_cupti_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise DeviceUnavailable("there is no GPU")

    monkeypatch.setattr(module, "device", missing)
    with pytest.raises(DeviceUnavailable, match="there is no GPU"), dp.trace.profile():
        pass
    host = dp.device("host")
    monkeypatch.setattr(module, "device", lambda _name: host)
    monkeypatch.setenv("CUDABIND_CUPTI_PATH", "/nowhere/libcupti.so.13")
    monkeypatch.setattr(_load, "_opened", {k: v for k, v in _load._opened.items() if k != "cupti"})
    with pytest.raises(DeviceUnavailable, match=r"profile\(\) needs CUPTI"), dp.trace.profile():
        pass


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("Kernel9 Kernel10 Kernel11 Kernel12 Kernel13", "start end deviceId contextId streamId correlationId name"),
        ("Kernel9 Kernel10 Kernel11 Kernel12 Kernel13", "gridX gridY gridZ blockX blockY blockZ graphNodeId"),
        ("Kernel9 Kernel10 Kernel13", "registersPerThread staticSharedMemory dynamicSharedMemory"),
        ("Memcpy6 Memcpy7", "copyKind bytes start end deviceId contextId streamId correlationId graphNodeId"),
        ("Memset4 Memset5", "bytes start end deviceId contextId streamId correlationId graphNodeId"),
    ],
)  # fmt: skip
def test_a_record_of_a_version_between_those_that_are_listed_is_read_right(family: str, fields: str) -> None:
    for field in fields.split():
        offsets = {getattr(getattr(cupti, f"CUpti_Activity{name}"), field).offset for name in family.split()}
        assert len(offsets) == 1, field
