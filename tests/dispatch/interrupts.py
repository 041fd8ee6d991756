"""Ctrl-C in the main thread at every place where the interpreter lets it in.

A signal's handler runs only between certain steps of the interpreter: as a function begins, after a call, at the end of
a loop. `Interrupts` raises KeyboardInterrupt at such a place in the project's code, one after the other, until each has
been hit. Between other steps no signal ever comes: one raised there, as at the end of a `with lock:`, would leave locks
held that no signal leaves so.
"""

from __future__ import annotations

import concurrent.futures
import dis
import functools
import os
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise import supervisor as supervisor_module
from dispatch.supervise.future import Future

PATIENCE = 120  # seconds, on a machine that has other things to do
EVERYWHERE = bool(os.environ.get("EVERYWHERE"))  # all places with processes, too, which takes minutes
PROJECT = str(Path(dp.__file__).parent)
# After these instructions the interpreter looks for signals.
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION", "CALL_FUNCTION_KW", "CALL_FUNCTION_EX", "CALL_METHOD")
CHECKS = frozenset(dis.opmap.get(name, -1) for name in (*CALLS, "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE"))

FINALIZED = weakref.finalize.__call__.__code__


@functools.cache
def handlers(code):
    """Where exceptions of which instructions are handled; before Python 3.11 the interpreter knows that by itself."""
    return tuple(getattr(dis.Bytecode(code), "exception_entries", ()))


def handler_of(code, offset):
    return next((entry.target for entry in handlers(code) if entry.start <= offset < entry.end), None)


class Interrupts:
    """Runs something again and again, each time with a KeyboardInterrupt at a place that has not been hit yet.

    Of `share` places one is chosen by chance, where all would take too long; `within` is the end of a file's name.
    """

    def __init__(self, share: int, rng, within: str = "") -> None:
        self.share, self.rng, self.within = share, rng, within
        self.hit: set[object] = set()
        self.place: object = None
        self._last: dict[object, int] = {}  # frame -> the offset of the instruction before

    @staticmethod
    def _in_destructor(frame) -> bool:
        """There the interpreter itself prints what is raised, and passes over it."""
        while frame is not None:
            if frame.f_code.co_name in ("__del__", "_after_collection") or frame.f_code is FINALIZED:
                return True
            frame = frame.f_back
        return False

    def _look(self, frame, offset) -> None:
        """Raise where a signal may come in before this instruction."""
        if self.place is not None:
            return
        code = frame.f_code
        last, self._last[frame] = self._last.get(frame), offset
        if offset and (last is None or code.co_code[last] not in CHECKS):
            return
        if last is not None and handler_of(code, last) != handler_of(code, offset):
            return  # the signal would have come before the end of a block, and this is behind it
        if not offset and "RESUME" in dis.opmap:  # the look for signals is behind that
            return
        place = (code, offset, frame.f_back and frame.f_back.f_code)
        if place in self.hit or self._in_destructor(frame):
            return
        self.hit.add(place)
        if self.rng.integers(self.share) or not code.co_filename.endswith(self.within):
            return
        self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        raise KeyboardInterrupt

    def run(self, action) -> bool:
        """Call `action()` once with an interrupt at a new place; False where there was no place left."""
        self.place = None
        try:
            with seen(self._look):
                action()
        except KeyboardInterrupt:
            pass
        finally:
            self._last.clear()  # which holds frames, and these their futures
        return self.place is not None


@contextmanager
def seen(look):
    """Have `look(frame, offset)` called before each instruction of the project's code on this thread."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:

        def local(frame, event, _arg):
            if event == "opcode":
                look(frame, frame.f_lasti)
            return local

        def begin(frame, _event, _arg):
            if not frame.f_code.co_filename.startswith(PROJECT):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return local

        sys.settrace(begin)
        try:
            yield
        finally:
            sys.settrace(None)
        return

    # From Python 3.12 on a trace of instructions begins late, and ends where another thread runs the same function.
    me, instruction = threading.get_ident(), monitoring.events.INSTRUCTION

    def told(code, offset):
        if not code.co_filename.startswith(PROJECT):
            return monitoring.DISABLE
        if threading.get_ident() == me:
            look(sys._getframe(1), offset)
        return None

    monitoring.use_tool_id(monitoring.DEBUGGER_ID, "interrupts")
    try:
        monitoring.register_callback(monitoring.DEBUGGER_ID, instruction, told)
        monitoring.set_events(monitoring.DEBUGGER_ID, instruction)
        yield
    finally:
        monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.NO_EVENTS)
        monitoring.register_callback(monitoring.DEBUGGER_ID, instruction, None)
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)


@pytest.fixture
def made(monkeypatch):
    """All futures that supervisors make and anybody holds, whether or not they were handed out."""
    futures: list[weakref.ref[Future]] = []

    class Noted(Future):
        __slots__ = ()

        def __init__(self, request):
            super().__init__(request)
            futures.append(weakref.ref(self))

    monkeypatch.setattr(supervisor_module, "Future", Noted)
    return futures


def settle(sup, made, place):
    """Whatever was interrupted: all futures end, and the supervisor works."""
    ends = time.monotonic() + PATIENCE
    for future in filter(None, [ref() for ref in made]):
        done, _ = concurrent.futures.wait([future], max(ends - time.monotonic(), 0))
        assert done, f"interrupted in {place}, {future!r} never ended"
        if not future.cancelled():
            future.exception()
    made.clear()
    for queue in sup._pool.queues:
        assert not sup._pool.lock.locked(), place
        for name in ("send_lock", "recv_lock"):
            lock = getattr(queue, name, None)
            assert lock is None or lock.acquire(timeout=PATIENCE), (name, place)
            if lock is not None:
                lock.release()


def request_of(sup):
    a = sup.device.array(np.eye(4, dtype=np.float32))
    return dp.MatmulRequest(a, a)


def check_works(sup, request, place):
    assert (sup.submit(request).result(PATIENCE).numpy() == np.eye(4)).all(), place


@pytest.fixture
def no_threads_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread
