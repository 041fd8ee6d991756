"""Ctrl-C in the main thread at every place where the interpreter lets it in: every future ends, nothing is left held.

A signal's handler runs only between certain steps of the interpreter: as a function begins, after a call, at the end of
a loop. `Interrupts` raises KeyboardInterrupt at such a place in the project's code, one after the other, until each has
been hit. Between other steps no signal ever comes: one raised there, as at the end of a `with lock:`, would leave locks
held that no signal leaves so.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dis
import functools
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise import supervisor as supervisor_module
from dispatch.supervise.future import Future
from dispatch.supervise.process import messages

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


def awaited(sup, request):
    """As asyncio.run() does, but that a loop that was interrupted runs nothing more."""

    async def one():
        return [await future for future in [sup.submit(request), sup.submit(request)]]

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(one())
    finally:
        loop.close()


def cancel_some(sup, request):
    futures = sup.submit_many([request] * 4)
    for future in futures[::-1]:
        future.cancel()


def drop(sup, request):
    for _ in range(3):
        sup.submit(request, priority=1)


def known(sup, request):
    """A request with an output of its own, which its child will know."""
    kept = vars(request)
    if "again" not in kept:
        kept["again"] = dp.MatmulRequest(request.a, request.a, out=sup.device.zeros((4, 4)))
    return kept["again"]


def submit_known(sup, request):
    """As many at once, whose child knows them, as go together."""
    sup.submit_many([known(sup, request)] * 12)


def sampled(sup, request):
    """Submit as often as it takes for the last request to be one whose latency is measured."""
    while True:
        future = sup.submit(request)
        if future._waiting is not None and future._waiting.callbacks:
            return future
        future.result(PATIENCE)


ACTIONS = {
    "submit": lambda sup, request: [sup.submit(request) for _ in range(2)],
    "submit later": lambda sup, request: sup.submit(
        request, timeout=PATIENCE, priority=-1, after=[sup.submit(request)]
    ),
    "submit fresh": lambda sup, request: sup.submit(request.replace(a=request.a, b=request.b)),
    "submit many": lambda sup, request: sup.submit_many([request] * 12),
    "submit known": submit_known,
    "submit known alone": lambda sup, request: sup.submit(known(sup, request)).result(PATIENCE),
    "result": lambda sup, request: sup.submit(request).result(PATIENCE),
    "results": lambda sup, request: [future.result(PATIENCE) for future in sup.submit_many([request] * 3)],
    "await": awaited,
    "cancel": cancel_some,
    "sample": lambda sup, request: sampled(sup, request).result(PATIENCE),
    "callback": lambda sup, request: sup.submit(request).add_done_callback(lambda future: future.done()),
}


@pytest.fixture
def no_threads_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread


def go_through(sup, made, action, share, rng):
    request = request_of(sup)
    check_works(sup, request, "nothing")
    interrupts, count, quiet = Interrupts(share, rng), 0, 0
    while quiet < 3:  # what other threads do varies: not every run comes to the same places
        if interrupts.run(lambda: action(sup, request)):
            count, quiet = count + 1, 0
        else:
            quiet += 1
        settle(sup, made, interrupts.place)
        check_works(sup, request, interrupts.place)
        made.clear()
    return count


@pytest.mark.parametrize("what", ACTIONS)
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.usefixtures("no_threads_left")
def test_an_interrupt_anywhere_ends_every_future_and_harms_no_other(isolation, what, made, rng):
    share = 1 if isolation == "thread" or EVERYWHERE else 5
    with dp.Supervisor("host", streams=2, isolation=isolation, queue_size=4) as sup:
        count = go_through(sup, made, ACTIONS[what], share, rng)
        assert sup._pool.failures.take() is None  # no interrupt was kept in the place of a callback's error
    print(f"{count} places")
    assert count >= 10
    if isolation == "process":
        sup.device.close()


# -- its beginning and its end, once for each place -------------------------------------------------------------------
def whole_life(isolation, ways):
    """Make a supervisor, submit and leave it; whatever is interrupted there, all ends."""
    with dp.Supervisor("host", streams=2, isolation=isolation) as sup:
        ways.append(sup)
        sup.submit_many([request_of(sup)] * 8)
    sup.close()


@pytest.mark.filterwarnings("ignore:a supervisor of:ResourceWarning")  # interrupted before its block began
@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.usefixtures("no_threads_left")
def test_an_interrupt_anywhere_in_its_life_leaves_no_thread_and_no_future(isolation, made, rng):
    share = 1 if EVERYWHERE else 3 if isolation == "thread" else 60
    interrupts, quiet, count, before = Interrupts(share, rng), 0, 0, set(threading.enumerate())
    while quiet < 2:
        ways: list[dp.Supervisor] = []
        if interrupts.run(lambda ways=ways: whole_life(isolation, ways)):
            count, quiet = count + 1, 0
        else:
            quiet += 1
        for sup in ways:
            sup.close()  # a second time: it waits for what the first did not
            sup.device.close() if isolation == "process" else None
        for thread in set(threading.enumerate()) - before:
            thread.join(PATIENCE)
            assert not thread.is_alive(), (thread, interrupts.place)
        assert all(future.done() for future in filter(None, [ref() for ref in made])), interrupts.place
        made.clear()
    print(f"{count} places")
    assert count > (50 if share < 10 else 0)


@pytest.fixture
def unhurried():
    """A thread goes on until it waits, so that the queues do fill, however slow the machine."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1.0)
    yield
    sys.setswitchinterval(interval)


FULL = {
    "one by one": lambda sup, probe: [sup.submit(probe()) for _ in range(9)],
    "as many as there is room for": lambda sup, probe: sup.submit_many([probe(), probe()]),
}


@pytest.mark.parametrize("how", FULL)
@pytest.mark.parametrize("when_full", ["block", "drop_oldest"])
@pytest.mark.usefixtures("no_threads_left", "unhurried")
def test_an_interrupt_where_queues_are_full_keeps_nobody_waiting(probe, made, rng, when_full, how):
    interrupts, quiet = Interrupts(1, rng), 0
    with dp.Supervisor("host", streams=1, queue_size=2, when_full=when_full) as sup:
        while quiet < 2:
            quiet = 0 if interrupts.run(lambda: FULL[how](sup, probe)) else quiet + 1
            settle(sup, made, interrupts.place)
            assert sup.submit(probe(lambda: 5)).result(PATIENCE) == 5
            made.clear()
    assert len(interrupts.hit) > 30


# -- what must happen exactly once -----------------------------------------------------------------------------------
def test_frames_that_are_sent_and_received_under_interrupts_lose_and_double_no_byte(rng):
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    near, far = map(messages.Connection, ends)
    sent = [[number, bytes([number % 256]) * (number * 37 % 9000)] for number in range(1, 400)]
    left, got = deque(sent), []

    def go():
        """One step of who sends, and one of who receives; each goes on where it was."""
        if near.flush() and left:
            near.put(left[0], left[0][0])
        while left and near.out.last == left[0][0]:
            left.popleft()
        message = far.peek(wait=False)
        if message is not None:
            if not got or got[-1] != message:
                got.append(message)
            far.advance()

    while len(got) < len(sent):
        for _ in range(20):
            Interrupts(1, rng).run(go)  # at the first place of a step
        interrupts = Interrupts(1, rng)
        while interrupts.run(go) and len(got) < len(sent):  # and at each in turn
            pass
    assert got == sent
    for link in (near, far):
        link.close()


def test_a_request_whose_sending_is_interrupted_runs_once(made, rng):
    """Each adds to a sum, which says how often it ran."""
    interrupts, quiet = Interrupts(1, rng, "sending.py"), 0
    with dp.Supervisor("host", streams=1, isolation="process") as sup:
        one, total = sup.device.array(np.eye(4, dtype=np.float32)), sup.device.zeros((4, 4))
        request = dp.MatmulRequest(one, one, c=total, beta=1.0, out=total)
        while quiet < 2:
            given: list[Future] = []
            before = total.numpy()[0, 0]
            quiet = 0 if interrupts.run(lambda given=given: given.append(sup.submit(request))) else quiet + 1
            ran = sum(future.exception(PATIENCE) is None for future in made_now(made) if not future.cancelled())
            settle(sup, made, interrupts.place)
            sup.submit(dp.MatmulRequest(one, one)).result(PATIENCE)  # behind it, at the same worker
            made.clear()
            assert ran <= total.numpy()[0, 0] - before <= 1, interrupts.place  # one that nobody holds may have run
    sup.device.close()
    assert len(interrupts.hit) > 50


def made_now(made):
    """Those that are held by anybody, once all have ended."""
    futures = list(filter(None, [ref() for ref in made]))
    assert not concurrent.futures.wait(futures, PATIENCE).not_done
    return futures
