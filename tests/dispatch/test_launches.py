"""Launches keep the interpreter's lock while their stream surely has room for them, and else let go of it."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import pytest

from dispatch.device.stream import NULL_CONTEXT
from dispatch.execute import cuda_graph, launches
from dispatch.execute.launches import HALF, STREAMS, Launches

spec = importlib.util.spec_from_file_location("graph_stand_in", Path(__file__).with_name("graph_stand_in.py"))
stand_in = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stand_in)


class Room:
    """A stream of the driver's: how much was enqueued on it and is done, and what launches found there."""

    def __init__(self, patch):
        self.enqueued = self.done = self.queries = 0
        self.events = {}  # what was enqueued before each
        self.held, self.outstanding = [], []  # of each launch: whether it kept the lock, and what was not done
        self.recycled = []
        self.status = 0
        self.nodes = 1
        launch = SimpleNamespace(unchecked=self.launch(False), unchecked_holding_gil=self.launch(True))
        query, record = (SimpleNamespace(unchecked_holding_gil=f) for f in (self.query, self.record))
        made = SimpleNamespace(cuGraphLaunch=launch, cuEventQuery=query, cuEventRecord=record)
        patch(launches, "driver", made)
        patch(cuda_graph, "driver", made)

    def launch(self, holds):
        def launch(_graph, stream):
            assert stream.value == 5
            self.held.append(holds)
            self.outstanding.append(self.enqueued - self.done)
            self.enqueued += self.nodes
            return 0

        return launch

    def query(self, event):
        self.queries += 1
        return self.status or (0 if self.done >= self.events[event.value] else 600)

    def record(self, event, stream):
        assert stream.value == 5
        self.events[event.value] = self.enqueued
        return self.status

    def stream(self, *, external=False, context=NULL_CONTEXT):
        device = SimpleNamespace(event=lambda: ctypes.c_void_p(9), recycle=self.recycled.append)
        return SimpleNamespace(external=external, context=context, device=device)


@pytest.fixture(autouse=True)
def _nobody_else(monkeypatch):
    """What other tests have left alive has no share of the room."""
    monkeypatch.setattr(Launches, "used", WeakSet())


def test_many_streams_have_less_room_each(monkeypatch):
    """They may share the driver's queues: all together keep the lock for a bounded number of launches."""
    room = Room(monkeypatch.setattr)
    made = [made_on(room) for _ in range(4 * STREAMS)]
    calls = [one.of(ctypes.c_void_p(1), 1, holds_gil=False) for one in made]
    for _ in range(4 * HALF):
        for call in calls:
            call()
    assert sum(room.held) <= 4 * HALF * STREAMS  # without shares twice as many
    for one in made[1:]:
        one.close()
    room.done = room.enqueued
    room.held.clear()
    for _ in range(8):
        calls[0]()
    assert all(room.held[1:])  # the first one looks how far all before it is
    assert made[0].left > HALF // 2, "the room is its own again"


def made_on(room, **how):
    return Launches(room.stream(**how), ctypes.c_void_p(5))


def check_room(monkeypatch):
    """Those that keep the lock never find more outstanding than there surely is room for, however slow the GPU is."""
    for seed in range(60):
        rng, room = stand_in.seeded(seed), Room(monkeypatch.setattr)
        made = made_on(room)
        room.nodes = rng.choice((1, 1, 3, 40))
        launch = made.of(ctypes.c_void_p(1), room.nodes, holds_gil=False)
        for _ in range(1500):
            assert launch() == 0
            pace = rng.choice((0, 0, room.nodes, 3 * room.nodes)) if rng.random() < 0.99 else rng.randrange(3000)
            room.done = min(room.enqueued, room.done + pace)
            if rng.random() < 0.02:  # calls of libraries, which wait for room themselves
                calls = rng.randrange(400)
                made.left -= 8 * calls
                room.enqueued += 8 * calls
        held = [was for was, is_held in zip(room.outstanding, room.held, strict=True) if is_held]
        assert max(held) <= 4 * HALF + room.nodes
        assert not all(room.held)


def check_done(monkeypatch):
    """On a stream whose work is always done all keep the lock, and few look at it; behind a fault none does."""
    room = Room(monkeypatch.setattr)
    made = made_on(room)
    launch, other = (made.of(ctypes.c_void_p(n), 1, holds_gil=False) for n in (1, 2))
    for turn in range(20 * HALF):
        (other if turn % 2 else launch)()
        room.done = room.enqueued
    assert all(room.held)
    assert 10 < room.queries <= 20
    room.status = 700
    for _ in range(3 * HALF):
        launch()
    assert not any(room.held[-2 * HALF :])
    assert not room.recycled
    for _ in range(2):
        made.close()
    assert [event.value for event in room.recycled] == [9]


def test_launches_keep_the_lock_while_there_is_room(monkeypatch):
    check_room(monkeypatch)


def test_launches_on_a_stream_without_work_keep_the_lock(monkeypatch):
    check_done(monkeypatch)


def test_the_first_launch_behind_many_calls_of_a_library_lets_go_of_the_lock(monkeypatch):
    room = Room(monkeypatch.setattr)
    made = made_on(room)
    made.left -= 8 * 500
    room.enqueued += 8 * 500
    launch = made.of(ctypes.c_void_p(1), 1, holds_gil=False)
    launch()
    launch()
    assert room.held == [False, False]
    room.done = room.enqueued
    launch()
    assert room.held == [False, False, True]


class Context:
    """A context that may be entered again and again."""

    def __init__(self, seen):
        self._seen = seen

    def __enter__(self):
        self._seen.append("in")

    def __exit__(self, *_):
        self._seen.append("out")


@pytest.mark.parametrize(("holds", "external"), [(True, False), (True, True), (False, True)])
def test_launches_on_streams_that_nobody_counts_on(monkeypatch, external, holds):
    """Of other libraries' streams nobody knows what is on them, and who sees to the room himself is not helped."""
    room, entered = Room(monkeypatch.setattr), []
    made = made_on(room, external=external)
    launch = made.of(ctypes.c_void_p(1), 3, holds_gil=holds)
    for _ in range(3 * HALF):
        assert launch() == 0
    assert room.held == [holds] * (3 * HALF)
    assert (made.left, room.queries, room.events) == (HALF, 0, {})
    default = made_on(room, external=external, context=Context(entered))
    assert default.of(ctypes.c_void_p(1), 3, holds_gil=holds)() == 0
    assert room.held[-1] is holds
    assert entered == ["in", "out"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.left -= nodes", "self.left -= 0"),
        ("self.left > 0 or self._begins_anew()", "True"),
        ("self.left > 0 or self._begins_anew()", "self.left > 0"),
        ("elif driver.cuEventQuery", "elif not driver.cuEventQuery"),
        ("elif driver.cuEventQuery", "elif () and driver.cuEventQuery"),
        ("if self.left < -HALF:", "if False:"),
        ("        self.left = self._share()\n        return True", "        return True"),
    ],
)
def test_a_defect_is_found(monkeypatch, old, new):
    stand_in.mutate(monkeypatch, launches, "Launches", old, new)
    monkeypatch.setitem(globals(), "Launches", launches.Launches)
    with pytest.raises(AssertionError):  # noqa: PT012
        check_room(monkeypatch)
        check_done(monkeypatch)
