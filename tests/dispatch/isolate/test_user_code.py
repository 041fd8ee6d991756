"""What code of a user's own may do in a child: leave processes behind, and raise what is no Exception where it may."""

from __future__ import annotations

import importlib
import signal
import sys

import pytest

import dispatch as dp
from dispatch.errors import BadRequest, DeviceFault, WorkerFailed

PATIENCE = 120  # seconds, on a machine that has other things to do

CHILDS = """
import os, time
from pathlib import Path
import trouble

class NeverPickled(Exception):
    def __reduce__(self):
        raise SystemExit(3)

def happen(kind, once, before=trouble.happen):
    if kind.startswith("fork") and os.fork() == 0:
        while Path(once).exists():
            time.sleep(0.05)
        os._exit(0)
    if kind == "fork and die":
        os._exit(4)
    if kind == "never pickled":
        raise NeverPickled
    if kind != "fork":
        before(kind, once)

trouble.happen = happen
"""
BOTH = """
import sys
from pathlib import Path
from dispatch.errors import DeviceFault
from dispatch.keys import F32
from trouble import Trouble

class LoadsNever(Trouble):
    def __setstate__(self, state):
        raise SystemExit(5)

class LoadsInAFault(Trouble):
    def __setstate__(self, state):
        self.__dict__.update(state)
        if not Path(self.once).exists():  # the device is lost by another worker's request meanwhile
            Path(self.once).touch()
            self.device.fault = DeviceFault("lost meanwhile")
            raise self.device.fault

class LacksNever(Trouble):
    def unallocated(self):
        if "childs" in sys.modules:
            raise SystemExit(6)
        return {"more": ((8,), (1,), F32)}
"""
STARTS = """
import os
import childs
childs.happen("fork and die", {file!r})
"""


@pytest.fixture
def own(trouble, tmp_path, monkeypatch):
    """Modules of a user's own: `childs` for the child alone, `both`, and `starts`, with which a child never starts."""
    assert trouble.__name__ == "trouble"
    (tmp_path / "stays").touch()  # what is forked ends when this goes
    texts = {"childs": CHILDS, "both": BOTH, "starts": STARTS.format(file=str(tmp_path / "stays"))}
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    (tmp_path / "stays").unlink()
    sys.modules.pop("both", None)


@pytest.fixture
def sup(own):
    assert own.is_dir()  # the modules are there before a child imports them
    made = dp.Supervisor("host", isolation="process", streams=1, setup=("trouble", "childs"), max_seconds=1000)
    yield made
    made.close()
    made.device.close()


def request_of(sup, kind, folder, made=None):
    x, y = sup.device.zeros(8), sup.device.zeros(8)
    return (made or sys.modules["trouble"].Trouble)(kind, x, y, str(folder / "stays"))


def test_a_child_that_is_lost_is_missed_though_what_it_forked_lives_on(sup, own):
    sup.submit(request_of(sup, "fork", own)).result(PATIENCE)
    hold = sys.modules["trouble"].Hold(own)
    held = sys.modules["trouble"].Trouble("held", sup.device.zeros(8), sup.device.zeros(8), hold.once)
    future = sup.submit(held)
    hold.release_behind(sup._pool._child.process.pid, signal.SIGKILL, PATIENCE)
    assert future.result(PATIENCE) is held.out
    assert sup.stats().restarts == 1


def test_a_request_that_forks_and_ends_its_child_is_found(sup, own):
    futures = sup.submit_many([request_of(sup, kind, own) for kind in ("fork", "fork and die", "fork")])
    assert isinstance(futures[1].exception(PATIENCE), DeviceFault)
    assert [future.exception(PATIENCE) for future in futures[::2]] == [None, None]


@pytest.mark.usefixtures("own")
def test_a_child_that_forks_and_ends_while_it_starts_is_not_waited_for():
    with pytest.raises(WorkerFailed, match="ended with status 4 before it was ready"):
        dp.Supervisor("host", isolation="process", setup=("trouble", "starts"))


def test_an_error_whose_pickling_exits_costs_its_request_alone(sup, own):
    futures = sup.submit_many([request_of(sup, kind, own) for kind in ("never pickled", "fine")])
    error = futures[0].exception(PATIENCE)
    assert isinstance(error, WorkerFailed)
    assert "NeverPickled" in str(error)
    assert futures[1].exception(PATIENCE) is None


@pytest.mark.parametrize(("name", "error"), [("LoadsNever", BadRequest), ("LacksNever", WorkerFailed)])
def test_a_request_that_exits_while_a_child_prepares_it_costs_itself_alone(sup, own, name, error):
    made = getattr(importlib.import_module("both"), name)
    futures = sup.submit_many([request_of(sup, "fine", own, made), request_of(sup, "fine", own)])
    failed = futures[0].exception(PATIENCE)
    assert isinstance(failed, error)
    assert "SystemExit" in str(failed)
    assert futures[1].exception(PATIENCE) is None
    assert sup.stats().restarts == 0


def test_a_request_that_a_child_rebuilds_as_the_device_is_lost_goes_to_the_next(sup, own):
    once = sys.modules["trouble"].Trouble("fine", sup.device.zeros(8), sup.device.zeros(8))
    request = importlib.import_module("both").LoadsInAFault("fine", once.a, once.out, str(own / "lost"))
    futures = sup.submit_many([request, once])
    assert [future.exception(PATIENCE) for future in futures] == [None, None]
    assert sup.stats().restarts == 1
