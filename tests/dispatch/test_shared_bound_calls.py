"""One plan called by several threads at once, as a bound call with other operands is: each has its own addresses.

And streams of other libraries that are named as Ctrl-C comes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dispatch.device import external
from dispatch.device.cuda import CudaDevice
from dispatch.execute import plan_relocation

spec = importlib.util.spec_from_file_location("plans", Path(__file__).with_name("test_plan_relocation.py"))
plans = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plans)

graphs, call_of, right = plans.stand_in, plans.call_of, plans.right
driver, logged = plans.driver, plans.logged
A, B = plans.A, plans.B
THREADS, CALLS, PATIENCE = 4, 400, 60


class SlotPlan(graphs.LibraryPlan):
    """Keeps the addresses of a call in memory of its own while its library reads them, as all plans of libraries do."""

    __slots__ = ("executor", "slots")

    def __init__(self, call, executor):
        super().__init__(call)
        self.slots, self.executor = [None, None], executor

    def enqueue(self, arguments):
        for place, address in enumerate(arguments):
            self.slots[place] = address
            time.sleep(0)  # the interpreter's lock is let go of, as within a foreign call
        self.called.append((threading.get_ident(), tuple(self.slots), self.executor.is_recording))


class Executor(graphs.GraphExecutor):
    """Notes whether a recording is under way, into which everything would go that is enqueued meanwhile."""

    is_recording = False

    def recorded(self, plan, arguments):
        self.is_recording = True
        try:
            time.sleep(0.0002)
            return super().recorded(plan, arguments)
        finally:
            self.is_recording = False


def check_threads(driver, monkeypatch, unlocked=False):
    """The images of each thread's calls, launched or by the library, are those of its own addresses, each once."""
    monkeypatch.setattr(plan_relocation, "FIRST", 20)
    monkeypatch.setattr(plan_relocation, "EVERY", 2)
    executor = Executor(driver)
    if unlocked:
        executor._calls = contextlib.nullcontext()
    plan = SlotPlan(call_of(), executor)
    driver.on_run = lambda: time.sleep(0)
    start, errors = threading.Barrier(THREADS), []

    def given(thread, number):
        return A + 4096 * number + (thread << 40), B + 4096 * number + (thread << 40)

    def run(thread):
        start.wait(PATIENCE)
        try:
            for number in range(CALLS):
                executor.enqueue(plan, given(thread, number), (), ())
        except BaseException as error:  # noqa: BLE001  # shown below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert not errors
    assert not any(is_recording for *_, is_recording in plan.called)
    images = [*driver.launched, *(right(plan, slots) for _, slots, _ in plan.called)]
    expected = [right(plan, given(thread, number)) for thread in range(THREADS) for number in range(CALLS)]
    assert sorted(images) == sorted(expected)
    assert driver.launched
    assert plan.launch is not None
    assert executor.relocation_stats()["differed"] == 0


def test_threads_that_share_a_plan_have_each_its_own_addresses(driver, logged, monkeypatch):
    check_threads(driver, monkeypatch)
    assert not logged


@pytest.mark.usefixtures("logged")
def test_without_the_lock_they_have_each_other_s(driver, monkeypatch):
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_threads(driver, monkeypatch, unlocked=True)


# -- Ctrl-C while a stream of another library is named ----------------------------------------------------------------
class Interrupt:
    """Ctrl-C at line number `at` of external.py, once; `lines` are those that were passed."""

    def __init__(self, at):
        self.at, self.lines = at, []

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename != external.__file__:
            return None
        if event == "line":
            self.lines.append(frame.f_lineno)
            if len(self.lines) - 1 == self.at:
                raise KeyboardInterrupt
        return self


def by_claim(theirs):
    with theirs.claimed():
        pass


def by_block(theirs):
    with theirs:
        pass


IDLE = ("try:", "finally:", "block: object = None")


def is_idle(line):
    """Lines where nothing is done, and no signal is taken."""
    return Path(external.__file__).read_text().splitlines()[line - 1].strip() in IDLE


@pytest.mark.parametrize("name", [by_claim, by_block])
def test_an_interrupt_at_any_line_leaves_no_claim(stand_in, name):
    """Else its handle would be given to the driver once its library has destroyed the stream."""
    made = stand_in(1)

    def work():
        dev = CudaDevice(0, 1)
        theirs = dev.external(made.begin_theirs())
        at, interrupted = 0, 0
        while True:
            tracer = Interrupt(at)
            sys.settrace(tracer)
            try:
                name(theirs)
            except KeyboardInterrupt:
                interrupted += 1
                sys.settrace(None)
                if not is_idle(tracer.lines[at]):
                    assert not theirs._claims, tracer.lines[at]
                theirs._claims.clear()
            finally:
                sys.settrace(None)
            if len(tracer.lines) <= at:
                break
            at += 1
        assert interrupted > 20
        assert not theirs._claims

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
