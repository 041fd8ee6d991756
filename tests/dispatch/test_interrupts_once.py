"""Ctrl-C at every place of a supervisor's life, where its queues are full, and where something must happen once."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import socket
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import dispatch as dp
from dispatch.supervise.process import messages

if TYPE_CHECKING:
    from dispatch.supervise.future import Future

spec = importlib.util.spec_from_file_location("interrupts", Path(__file__).with_name("interrupts.py"))
interrupts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(interrupts)
PATIENCE, EVERYWHERE, Interrupts = interrupts.PATIENCE, interrupts.EVERYWHERE, interrupts.Interrupts
made, settle, request_of = interrupts.made, interrupts.settle, interrupts.request_of
no_threads_left = interrupts.no_threads_left


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
        while left and near.outgoing.last == left[0][0]:
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
