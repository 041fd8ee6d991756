"""What is seen of a supervisor whose child is lost: log lines, counts, hooks in the child, and a journal to rerun."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys

import numpy as np
import pytest

import dispatch as dp
from dispatch.__main__ import main
from dispatch.errors import DeviceFault, HookFailed, TaintedTensor
from dispatch.supervise import status_server as status
from dispatch.supervise import trace
from dispatch.supervise.journal import read

PATIENCE = 120  # seconds, on a machine that has other things to do


@pytest.fixture
def open_supervisor(trouble):
    made = []

    def make(**options):
        options = {"streams": 2, "max_restarts": 100, "setup": (trouble.__name__,), **options}
        made.append(dp.Supervisor("host", isolation="process", **options))
        return made[-1]

    yield make
    for sup in made:
        sup.device.close()


def vector(dev, value=0.0):
    return dev.array(np.full(8, value, np.float32))


def make_trouble(sup, trouble, kind, **fields):
    return trouble.Trouble(kind, vector(sup.device, 3.0), vector(sup.device), **fields)


def test_the_loss_of_a_child_is_logged_with_cause_and_time(open_supervisor, trouble, caplog, tmp_path):
    caplog.set_level(logging.INFO, "dispatch")
    with open_supervisor() as sup:
        first = sup._pool._child.process.pid
        hold = trouble.Hold(tmp_path)
        held = sup.submit(make_trouble(sup, trouble, "held", once=hold.once))
        hold.release_behind(first, signal.SIGKILL, PATIENCE)
        held.result(PATIENCE)
        sup.submit(make_trouble(sup, trouble, "fine")).result(PATIENCE)
        second = sup._pool._child.process.pid
    told = [record.facts for record in caplog.records]
    assert [facts["event"] for facts in told][:4] == ["child started", "child lost", "child started", "child replaced"]
    assert [facts["pid"] for facts in told[:3]] == [first, first, second]
    assert told[1]["cause"] == told[3]["cause"] == "the child process died"
    assert told[3]["generation"] == 2
    assert 0 < told[2]["milliseconds"] <= told[3]["milliseconds"] < PATIENCE * 1000
    assert all(json.loads(record.getMessage()) == record.facts for record in caplog.records)


def test_a_supervisor_of_a_child_says_how_much_memory_is_used(open_supervisor, monkeypatch):
    monkeypatch.setattr(status, "TIMEOUT", float(PATIENCE))
    with open_supervisor() as sup:
        before = sup.stats().bytes_in_use
        held = sup.device.zeros((1 << 20,), "u8")
        assert sup.stats().bytes_in_use == before + (1 << 20)
        (facts,) = status.ask(os.getpid())
        assert (facts["bytes_in_use"], facts["generation"]) == (before + (1 << 20), 1)
        del held
        assert sup.stats().bytes_in_use == before


HOOKS = """
from dispatch import trace

def before(request):
    if getattr(request, "alpha", 1.0) == 13.0:
        raise OSError("thirteen")

trace.add(before=before)
"""


def test_hooks_of_the_enqueueing_are_called_in_the_child_that_adds_them(
    open_supervisor, trouble, tmp_path, monkeypatch
):
    (tmp_path / "child_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    here, ended = [], []
    hook = trace.add(before=here.append, ended=lambda request, error: ended.append((request, error)))
    with hook, open_supervisor(setup=(trouble.__name__, "child_hooks")) as sup:
        pid = sup._pool._child.process.pid
        a = sup.device.array(np.eye(4), "f32")
        good, bad = dp.MatmulRequest(a, a), dp.MatmulRequest(a, a, alpha=13.0)
        futures = sup.submit_many([good, bad, good], worker=0)
        with pytest.raises(HookFailed, match=r"before enqueueing matmul raised OSError\('thirteen'\)"):
            futures[1].result(PATIENCE)
        for future in (futures[0], futures[2]):
            assert np.array_equal(future.result(PATIENCE).numpy(), np.eye(4))
        assert (sup._pool._child.process.pid, sup.stats().restarts) == (pid, 0)
    assert here == []
    assert [(request, type(error)) for request, error in ended] == [
        (good, type(None)), (bad, HookFailed), (good, type(None)),
    ]  # fmt: skip


def test_a_journal_of_faults_is_run_again_with_the_same_outcomes(open_supervisor, trouble, tmp_path, capsys):
    path = tmp_path / "journal"
    with open_supervisor(streams=1, journal=path) as sup:
        guilty = make_trouble(sup, trouble, "exit")
        reader = trouble.Trouble("fine", guilty.out, vector(sup.device))
        for request, wanted in [
            (make_trouble(sup, trouble, "fine"), None),
            (guilty, DeviceFault),
            (reader, TaintedTensor),
            (trouble.Trouble("fine", guilty.a, guilty.out), None),
            (reader, None),
        ]:
            error = sup.submit(request).exception(PATIENCE)
            assert error is None if wanted is None else isinstance(error, wanted)
    header, lines = read(path)
    assert (header["isolation"], header["setup"]) == ("process", ["trouble"])
    assert [line["error"] for line in lines if "ended" in line] == ["DeviceFault", "TaintedTensor"]
    assert main(["replay", str(path), "--setup", "trouble"]) == 0
    assert "5 requests of host; 5 run again on host\nno difference in outcome\n" in capsys.readouterr().out
    assert "trouble" in sys.modules
    assert main(["replay", str(path)]) == 1
    assert "--setup trouble" in capsys.readouterr().out
