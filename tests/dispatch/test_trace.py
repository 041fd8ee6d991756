"""Hooks, NVTX ranges and log lines: when they are called, and what becomes of what they raise."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, DeviceUnavailable, HookFailed, QueueFull, Undelivered, WorkerFailed
from dispatch.logs import EVENTS
from dispatch.supervise import trace

PATIENCE = 120  # seconds, on a machine that has other things to do


@pytest.fixture(autouse=True)
def _no_hooks_are_left():
    assert trace.hooks == ()
    yield
    trace.hooks = ()


def boom(*_):
    raise OSError("from a hook")


def refuse():
    raise BadRequest("a", "this", "that")


# -- when they are called -------------------------------------------------------------------------------------------
def test_hooks_are_called_around_the_enqueueing_and_at_the_end(probe):
    seen = []

    def note(point):
        return lambda request, *rest: seen.append((point, request, threading.current_thread().name, *rest))

    with dp.Supervisor("host", streams=1) as sup:
        request = probe(lambda: seen.append(("run",)))
        with trace.add(note("before 1"), note("after 1"), note("ended")), trace.add(note("before 2"), note("after 2")):
            sup.submit(request).result(PATIENCE)
        sup.submit(request).result(PATIENCE)
    worker = "dispatch host worker 0"
    assert seen == [
        ("before 1", request, worker),
        ("before 2", request, worker),
        ("run",),
        ("after 2", request, worker),
        ("after 1", request, worker),
        ("ended", request, worker, None),
        ("run",),
    ]


def test_hooks_hear_of_all_that_is_submitted_at_once(probe):
    before, ended = [], []
    requests = [probe() for _ in range(200)]
    hook = trace.add(before=before.append, ended=lambda request, error: ended.append((request, error)))
    with hook, dp.Supervisor("host", streams=2) as sup:
        sup.submit_many(request for request in requests)
    assert sorted(map(id, before)) == sorted(map(id, requests))
    assert sorted((id(request), error) for request, error in ended) == sorted((id(r), None) for r in requests)


def test_the_end_says_how_and_delivers_nothing(probe):
    ended, entered, release = {}, threading.Event(), threading.Event()
    with trace.add(ended=ended.__setitem__):
        sup = dp.Supervisor("host", streams=1)
        stuck = probe(lambda: (entered.set(), release.wait(PATIENCE)))
        bad, gone = probe(refuse), probe()
        sup.submit(stuck)
        assert entered.wait(PATIENCE)
        sup.submit(bad)
        assert sup.submit(gone).cancel()
        release.set()
        with pytest.raises(Undelivered, match="1 failure") as caught:
            sup.close()
    assert ended[stuck] is None
    assert caught.value.exceptions == (ended[bad],)
    assert type(ended[gone]).__name__ == "CancelledError"


def test_after_is_called_where_the_enqueueing_failed(probe):
    left = []
    with trace.add(after=left.append), dp.Supervisor("host", streams=1) as sup:
        request = probe(refuse)
        with pytest.raises(BadRequest):
            sup.submit(request).result(PATIENCE)
    assert left == [request]


# -- what they raise ------------------------------------------------------------------------------------------------
def test_what_before_raises_fails_its_request_alone(probe):
    ran = []
    with dp.Supervisor("host", streams=1) as sup:
        bad, good = probe(lambda: ran.append("bad")), probe(lambda: ran.append("good"))
        with trace.add(before=lambda request: boom() if request is bad else None):
            failed, fine = sup.submit_many([bad, good])
            with pytest.raises(HookFailed, match="before enqueueing probe raised OSError") as caught:
                failed.result(PATIENCE)
            fine.result(PATIENCE)
        assert isinstance(caught.value.__cause__, OSError)
        stats = sup.stats()
    assert ran == ["good"]
    assert (stats.done, stats.failed, stats.restarts) == (1, 1, 0)


def test_what_after_raises_fails_its_request_and_the_other_hooks_are_left(probe):
    left = []
    with dp.Supervisor("host", streams=1) as sup, trace.add(after=left.append), trace.add(after=boom):
        request = probe(lambda: 5)
        with pytest.raises(HookFailed, match="after enqueueing"):
            sup.submit(request).result(PATIENCE)
        assert left == [request]
    assert sup.stats().restarts == 0


def test_a_request_that_fails_keeps_its_own_error(probe):
    with trace.add(after=boom), dp.Supervisor("host", streams=1) as sup, pytest.raises(BadRequest) as caught:
        sup.submit(probe(refuse)).result(PATIENCE)
    assert isinstance(caught.value.__context__, HookFailed)


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt])
def test_no_exception_of_a_hook_breaks_the_worker(probe, error):
    def leave(_):
        raise error

    with dp.Supervisor("host", streams=1) as sup:
        with trace.add(before=leave), pytest.raises(HookFailed):
            sup.submit(probe()).result(PATIENCE)
        assert sup.submit(probe(lambda: 5)).result(PATIENCE) == 5
        assert sup.stats().restarts == 0


def test_what_ended_raises_is_delivered_at_the_end(probe):
    sup = dp.Supervisor("host", streams=1)
    with trace.add(ended=boom):
        future = sup.submit(probe(lambda: 5))
        assert future.result(PATIENCE) == 5
    with pytest.raises(Undelivered, match="OSError: from a hook"):
        sup.close()


# -- log lines ------------------------------------------------------------------------------------------------------
def test_what_goes_wrong_is_logged_as_json(probe, caplog):
    caplog.set_level(logging.INFO, "dispatch")
    entered, release = threading.Event(), threading.Event()
    with dp.Supervisor("host", streams=1, queue_size=1, when_full="raise", max_restarts=1, max_seconds=1000) as sup:
        sup.submit(probe(lambda: (entered.set(), release.wait(PATIENCE))))
        assert entered.wait(PATIENCE)
        failed = sup.submit(probe(refuse))
        with pytest.raises(QueueFull):
            sup.submit(probe())
        release.set()
        assert failed.exception(PATIENCE)
        for _ in range(2):
            with pytest.raises(WorkerFailed):
                sup.submit(probe(lambda: 1 / 0)).result(PATIENCE)
    told = [json.loads(record.getMessage()) for record in caplog.records if record.name == "dispatch"]
    assert told == [record.facts for record in caplog.records]
    assert [fact["event"] for fact in told] == [
        "queue full", "request failed", "request failed", "worker replaced", "request failed", "circuit opened",
    ]  # fmt: skip
    assert told[1] == {"event": "request failed", "device": "host", "error": "BadRequest"} | {"words": told[1]["words"]}
    assert "expected that" in told[1]["words"]
    assert "ZeroDivisionError" in told[3]["cause"]
    levels = {record.facts["event"]: record.levelno for record in caplog.records}
    assert levels == {event: EVENTS[event] for event in levels}


def test_a_handler_that_raises_harms_nobody(probe):
    class Broken(logging.Handler):
        def handle(self, record):
            raise OSError("no disk")

    logger, handler = logging.getLogger("dispatch"), Broken()
    logger.addHandler(handler)
    try:
        with dp.Supervisor("host", streams=1) as sup:
            with pytest.raises(WorkerFailed):
                sup.submit(probe(lambda: 1 / 0)).result(PATIENCE)
            assert sup.submit(probe(lambda: 5)).result(PATIENCE) == 5
    finally:
        logger.removeHandler(handler)


QUIET = """
import sys
{imports}
import dispatch as dp
with dp.Supervisor("host", streams=1, max_restarts=0) as sup:
    sup.submit("no request").exception(20)
    sup._pool.replace(sup._pool.queues[0].worker, ZeroDivisionError())
print(sup, "logging" in sys.modules)
"""


@pytest.mark.parametrize("imports", ["", "import logging"])
def test_a_program_that_wants_no_log_sees_none(imports):
    done = run(QUIET.format(imports=imports))
    expected = f"<Supervisor of host, 1 workers, 0 requests queued, broken> {bool(imports)}\n"
    assert (done.stdout, done.stderr) == (expected, "")


def run(script, **environment):
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, env={**os.environ, **environment}
    )


# -- NVTX -----------------------------------------------------------------------------------------------------------
TOOL = r"""
// A tool as NVTX loads one: it writes the domains, ranges and their names to the file $SEEN.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef const void* (*GetTable)(uint32_t);
typedef struct { size_t size; int (*functions)(int module, void*** table, unsigned* size); } Callbacks;
typedef struct { uint16_t version, size; uint32_t category; int32_t colors; uint32_t color; int32_t payloads, zero;
                 uint64_t payload; int32_t kind; const char* message; } Attributes;
static void say(const char* what, const char* of) {
    FILE* file = fopen(getenv("SEEN"), "a");
    fprintf(file, "%s %s\n", what, of);
    fclose(file);
}
static void* domain(const char* name) { return strdup(name); }
static void* string(void* in, const char* text) { return strdup(text); }
static int push(void* in, const Attributes* range) { say((char*)in, range->message); return 0; }
static int pop(void* in) { say((char*)in, "pop"); return 0; }
int InitializeInjectionNvtx2(GetTable get) {
    const Callbacks* callbacks = get(1);
    void** table; unsigned size;
    if (!callbacks || !callbacks->functions(5, &table, &size)) return 0;
    *(void**)table[4] = push; *(void**)table[5] = pop; *(void**)table[10] = string; *(void**)table[12] = domain;
    return 1;
}
"""
RANGES = """
import runpy
import dispatch as dp
tools = runpy.run_path({conftest!r})
dp.register(tools["ROW"])
with dp.Supervisor("host", streams=1) as sup:
    sup.submit(tools["Probe"](lambda: 5)).result(120)
    sup.submit(tools["Probe"](lambda: 1 / 0)).exception(20)
"""


def test_requests_are_nvtx_ranges_where_the_environment_asks_for_it(tmp_path):
    pytest.importorskip("nvtx", reason="nvtx, which makes the ranges, is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which compiles the tool that sees the ranges, is not installed")
    source, library, seen = tmp_path / "tool.c", tmp_path / "tool.so", tmp_path / "seen"
    source.write_text(TOOL)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    script = RANGES.format(conftest=str(Path(__file__).with_name("conftest.py")))
    done = run(script, NVTX_INJECTION64_PATH=str(library), SEEN=str(seen), DISPATCH_NVTX="1")
    assert done.returncode == 0, done.stderr
    assert seen.read_text().splitlines() == ["dispatch probe()", "dispatch pop"] * 2


def test_without_nvtx_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(DeviceUnavailable, match="pip install nvtx"):
        trace.nvtx_ranges()
