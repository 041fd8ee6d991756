"""Requests of users' own that raise what nobody expects, in a child: it costs them, no child and no other request."""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import DeviceFault, WorkerFailed

PATIENCE = 60  # seconds, on a machine that has other things to do
# A module of requests that raise; `Private` is an error that only the children know.
CUSTOM = """
import os, sys
import dispatch as dp
import trouble
from dispatch.keys import F32, HOST
from dispatch.core.request import Plan

if os.getpid() != {parent}:
    class Private(Exception):
        pass

class Mute(Exception):
    def __repr__(self):
        raise RuntimeError("it has no words")
    __str__ = __repr__

class Custom(trouble.Trouble):
    op = "custom"

    def describe(self):
        if self.once == "mute":
            raise RuntimeError("it cannot be described")
        return super().describe()

    def unallocated(self):
        if self.kind != "outputs":
            return {{}}
        if os.getpid() != {parent}:
            raise RuntimeError("it has no outputs here")
        return {{"made": ((8,), (1,), F32)}}

class CustomPlan(Plan):
    __slots__ = ()

    def run(self, request, outputs):
        if request.kind == "die":
            os._exit(3)
        raise {{
            "EOFError": lambda: EOFError("no data left in the file"),
            "ConnectionError": lambda: ConnectionResetError("a server of its own"),
            "long": lambda: RuntimeError("x" * 2_000_000),
            "mute": lambda: Mute(),
            "private": lambda: Private("of the child alone"),
        }}[request.kind]()

ROW = dp.Row("custom", (F32,), None, (), HOST, HOST, (), "tests", "custom",
             lambda request, executor, row: CustomPlan(row, capture_safe=False))
dp.register(ROW)
"""


@pytest.fixture
def custom(trouble, tmp_path, monkeypatch):
    """The module, which the children import too."""
    assert trouble.__name__ == "trouble"  # by which the module finds it
    (tmp_path / "custom.py").write_text(CUSTOM.format(parent=os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("custom")
    yield module
    dp.TABLE.unregister(module.ROW)
    del sys.modules["custom"]


@pytest.fixture
def sup(custom):
    made = dp.Supervisor("host", isolation="process", streams=1, setup=(custom.__name__,), max_seconds=1000)
    yield made
    made._pool.end(3, WorkerFailed("the test is over"))
    made.close(wait=False)
    made._pool.join()
    made.device.close()


def operands(sup):
    return sup.device.array(np.ones(8, np.float32)), sup.device.zeros(8)


RAISED = {  # which error arrives, and what it says; one of a class that only the child knows is replaced
    "EOFError": (EOFError, "no data left in the file"),
    "ConnectionError": (ConnectionResetError, "a server of its own"),
    "long": (RuntimeError, "x" * 2_000_000),
    "mute": ("Mute", None),
    "private": (WorkerFailed, "Private: of the child alone (raised in the child process, with its type lost"),
}


@pytest.mark.parametrize("kind", RAISED)
def test_whatever_a_request_raises_costs_its_future_and_no_child(sup, custom, trouble, kind):
    child = sup._pool._child
    guilty = sup.submit(custom.Custom(kind, *operands(sup)))
    others = [sup.submit(trouble.Trouble("fine", *operands(sup))) for _ in range(3)]
    error = guilty.exception(PATIENCE)
    expected, words = RAISED[kind]
    assert type(error) is (getattr(custom, expected) if isinstance(expected, str) else expected)
    assert words is None or str(error).startswith(words)
    assert [future.exception(PATIENCE) for future in others] == [None] * 3
    assert sup._pool._child is child


def test_a_request_without_words_whose_child_dies_costs_no_other(sup, custom, trouble):
    guilty = sup.submit(custom.Custom("die", *operands(sup), "mute"))
    other = sup.submit(trouble.Trouble("fine", *operands(sup)))
    error = guilty.exception(PATIENCE)
    assert isinstance(error, DeviceFault)
    assert "it cannot be described" in str(error)
    assert other.exception(PATIENCE) is None


def test_a_request_that_cannot_say_in_the_child_what_it_makes_fails(sup, custom, trouble):
    guilty = sup.submit(custom.Custom("outputs", sup.device.array(np.ones(8, np.float32)), sup.device.zeros(8)))
    other = sup.submit(trouble.Trouble("fine", *operands(sup)))
    error = guilty.exception(PATIENCE)
    assert (type(error), str(error)) == (RuntimeError, "it has no outputs here")
    assert other.exception(PATIENCE) is None
