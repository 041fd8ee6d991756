"""The system refuses the n-th of what a supervisor of processes asks of it: it works all the same, or says so and goes.

Each call into the system that makes something fails in turn, over a supervisor's whole life: making it, memory, a first
request, another child in the place of a lost one, closing. What it raises is an error of `dispatch`; nothing is left;
and the next attempt works.
"""

from __future__ import annotations

import errno
import importlib
import mmap
import os
import select
import signal
import socket
import subprocess
import threading

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import DispatchError

PATIENCE = 120  # seconds, on a machine that has other things to do
EVERYWHERE = bool(os.environ.get("EVERYWHERE"))
LACKS = (errno.EMFILE, errno.ENOMEM, errno.EAGAIN)


class Shortage:
    """Has the n-th of such calls fail."""

    def __init__(self, monkeypatch, number, lack):
        self.number, self.lack, self.calls = number, lack, []
        calls = [(socket, "socketpair"), (os, "eventfd"), (os, "pipe"), (os, "memfd_create"), (mmap, "mmap")]
        calls += [(select, "epoll"), (select, "poll"), (subprocess, "_fork_exec"), (threading.Thread, "start")]
        for owner, name in calls:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, self.counted(name, getattr(owner, name)))

    def counted(self, name, call):
        def one(*args, **options):
            self.calls.append(name)
            if len(self.calls) == self.number:
                if name == "start":
                    raise RuntimeError("can't start new thread")
                raise OSError(self.lack, os.strerror(self.lack))
            return call(*args, **options)

        return one


def live():
    """A supervisor's whole life; what it raises is judged by the caller."""
    sup = dp.Supervisor("host", streams=1, isolation="process", max_restarts=20, max_seconds=1000)
    raised = []
    try:
        for _ in range(2):
            try:
                x = sup.device.array(np.eye(4, dtype=np.float32))
                assert (sup.submit(dp.MatmulRequest(x, x)).result(PATIENCE).numpy() == np.eye(4)).all()
            except DispatchError as error:
                raised.append(error)
            child = sup._pool._child
            if child is not None:
                child.process.send_signal(signal.SIGKILL)
        y = sup.device.array(np.eye(4, dtype=np.float32))
        try:
            assert (sup.submit(dp.MatmulRequest(y, y)).result(PATIENCE).numpy() == np.eye(4)).all()
        except DispatchError as error:
            raised.append(error)
    finally:
        try:
            sup.close()
        except DispatchError as error:
            raised.append(error)
        sup.device.close()
    return raised


@pytest.mark.usefixtures("trouble")
@pytest.mark.timeout(600)
def test_whatever_the_system_refuses_is_an_error_of_ours_and_leaves_nothing(monkeypatch, rng):
    remains = importlib.import_module("remains")
    live()
    before = remains.left_over()
    step = 1 if EVERYWHERE else 5
    number, outcomes = 1 + int(rng.integers(step)), []
    while True:
        lack = LACKS[number % len(LACKS)]
        with monkeypatch.context() as patch:
            shortage = Shortage(patch, number, lack)
            try:
                raised = live()
            except DispatchError as error:
                raised = [error]
        if len(shortage.calls) < number:
            break
        what = f"call {number}, {shortage.calls[number - 1]}, {os.strerror(lack)}"
        outcomes.append((what, [str(error)[:100] for error in raised]))
        print(*outcomes[-1])
        del raised
        for thread in threading.enumerate():
            if thread.name.startswith("dispatch"):
                thread.join(PATIENCE)
        assert remains.left_behind(before) == {}, what
        number += step
    assert len(outcomes) > 20 // step
    assert live() == []
