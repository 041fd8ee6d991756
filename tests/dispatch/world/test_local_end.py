"""Worlds of threads that end: a rank that leaves, a close in the wrong place, and a process that was forked."""

import importlib.util
import threading
from pathlib import Path

import numpy as np
import pytest

import dispatch as dp
from dispatch.errors import BadRequest, RankLost

spec = importlib.util.spec_from_file_location(
    "forked_programs", Path(__file__).parents[1].joinpath("forked_programs.py")
)
programs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(programs)

LONG = 600.0  # seconds: a deadline that no test here waits for


def full(world, value):
    return world.device.array(np.full(5, value, np.float32))


def receive(world):
    return dp.recv(world.device.empty((5,)), peer=1, comm=world)


@pytest.mark.parametrize("call", [lambda world: dp.all_reduce(full(world, 1), comm=world), receive])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_has_left_is_not_waited_for(call, is_first):
    entered, closed = threading.Event(), threading.Event()

    def run(world):
        if world.rank == 1:
            if not is_first:
                assert entered.wait(LONG)
            world.close()
            closed.set()
            return
        if is_first:
            assert closed.wait(LONG)
        entered.set()
        with pytest.raises(RankLost, match="rank 1 has closed its communicator and not called it") as caught:
            call(world)
        assert caught.value.ranks == (1,)

    with dp.World.local(["host"] * 2, deadline=LONG) as ranks:
        ranks.run(run)


def test_what_a_rank_has_sent_before_it_leaves_arrives():
    closed = threading.Event()

    def run(world):
        if world.rank == 1:
            dp.send(full(world, 7), peer=0, comm=world)
            world.close()
            closed.set()
            return None
        assert closed.wait(LONG)
        return receive(world).tolist()

    with dp.World.local(["host"] * 2, deadline=LONG) as ranks:
        assert ranks.run(run) == [[7.0] * 5, None]


def test_a_world_is_not_closed_inside_a_ranks_function():
    with dp.World.local(["host"] * 2, deadline=LONG) as ranks:
        with pytest.raises(BadRequest, match=r"^close: got a call inside a rank's function"):
            ranks.run(lambda _: ranks.close())
        assert ranks.rebuild().run(lambda world: dp.all_reduce(full(world, 1), comm=world).tolist()[0]) == [2.0, 2.0]


@pytest.mark.parametrize("grace", [-1, float("nan"), "x", True])
def test_a_grace_that_is_no_time_is_refused_before_anything_ends(grace):
    with dp.World.local(["host"], deadline=LONG) as ranks:
        (world,) = ranks.worlds
        with pytest.raises(BadRequest, match=r"^grace: got .*; expected a number from 0 to"):
            world.rebuild(grace=grace)
        assert dp.all_reduce(full(world, 1), comm=world).tolist() == [1.0] * 5


FORKED = """
x = np.ones(3, np.float32)
total = lambda world: float(dp.all_reduce(x, comm=world)[0])

def work():
    with dp.World.local(["host"] * 2) as own:
        assert own.run(total) == [2.0, 2.0]
    for call in (lambda: ranks.run(total), ranks.rebuild, lambda: total(ranks.worlds[0])):
        try:
            call()
        except Closed as error:
            assert "before os.fork()" in str(error), error
        else:
            raise AssertionError("a world of another process was used")
    ranks.worlds[0].abort()
    ranks.close()

ranks = dp.World.local(["host"] * 2)
assert ranks.run(total) == [2.0, 2.0]
assert forked(work) == 0
assert ranks.run(total) == [2.0, 2.0]
ranks.close()
print("fine")
"""


def test_a_forked_process_is_told_that_the_ranks_are_not_there():
    programs.run(FORKED)
