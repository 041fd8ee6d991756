"""Launches keep the interpreter's lock while their stream surely has room for them, and else let go of it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from dispatch.device.stream import NULL_CONTEXT
from dispatch.execute import cuda_graph, launches
from dispatch.execute.launches import MOST, Launches

spec = importlib.util.spec_from_file_location("graph_stand_in", Path(__file__).with_name("graph_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)


class Room:
    """A stream of the driver's, and which launches on it kept the interpreter's lock."""

    def __init__(self, patch):
        self.is_done, self.held, self.queries = True, [], 0
        launch = SimpleNamespace(unchecked=self.launch(False), unchecked_holding_gil=self.launch(True))
        query = SimpleNamespace(unchecked_holding_gil=self.query)
        made = SimpleNamespace(cuGraphLaunch=launch, cuStreamQuery=query)
        patch(launches, "driver", made)
        patch(cuda_graph, "driver", made)

    def launch(self, holds):
        return lambda *_: self.held.append(holds) or 0

    def query(self, stream):
        assert stream.value == 5
        self.queries += 1
        return 0 if self.is_done else 600


def stream_of(*, external=False, context=NULL_CONTEXT):
    return SimpleNamespace(external=external, context=context)


def check_room(monkeypatch, nodes=3):
    room = Room(monkeypatch.setattr)
    made = Launches(stream_of(), ctypes.c_void_p(5))
    launch, other = (made.of(ctypes.c_void_p(n), nodes, holds_gil=False) for n in (1, 2))
    fitting = (MOST - 1) // nodes
    for turn in range(fitting):
        assert (other if turn % 2 else launch)() == 0
    assert room.held == [True] * fitting
    assert room.queries == 0
    launch()
    assert (room.queries, room.held[-1], made.left) == (1, True, MOST)
    made.left = 1
    room.is_done = False
    for turn in range(5):
        launch()
        assert (room.queries, room.held[-1]) == (turn + 2, False)
    room.is_done = True
    other()
    assert (room.held[-1], made.left) == (True, MOST)


def test_launches_hold_the_lock_while_there_is_room(monkeypatch):
    check_room(monkeypatch)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("external", [False, True])
def test_launches_on_streams_that_nobody_counts_on(monkeypatch, external, holds):
    """Of other libraries' streams nobody knows what is on them, and who sees to the room himself is not helped."""
    room, entered = Room(monkeypatch.setattr), []

    made = Launches(stream_of(external=external), ctypes.c_void_p(5))
    launch = made.of(ctypes.c_void_p(1), 3, holds_gil=holds)
    for _ in range(2 * MOST):
        assert launch() == 0
    if holds or external:
        assert room.held == [holds] * (2 * MOST)
        assert (made.left, room.queries) == (MOST, 0)
    default = Launches(SimpleNamespace(external=True, context=Context(entered)), ctypes.c_void_p(5))
    before = len(room.held)
    assert default.of(ctypes.c_void_p(1), 3, holds_gil=holds)() == 0
    assert room.held[before:] == [holds]
    assert entered == ["in", "out"]


class Context:
    """A context that may be entered again and again."""

    def __init__(self, seen):
        self._seen = seen

    def __enter__(self):
        self._seen.append("in")

    def __exit__(self, *_):
        self._seen.append("out")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.left -= nodes", "self.left -= 1"),
        ("self.left > 0 or self._is_renewed()", "True"),
        ("if self._query():", "if self._query() is None:"),
        ("self.left = MOST\n        return True", "return True"),
    ],
)
def test_a_defect_of_launches_is_found(monkeypatch, old, new):
    stand_in.mutate(monkeypatch, launches, "Launches", old, new)
    monkeypatch.setitem(globals(), "Launches", launches.Launches)
    with pytest.raises(AssertionError):
        check_room(monkeypatch)
