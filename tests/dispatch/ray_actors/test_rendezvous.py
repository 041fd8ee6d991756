"""Who is in the next generation of Ray's actors, as the actor where they meet counts; and what is said without Ray."""

import sys

import pytest

import dispatch as dp
import dispatch.ray as dray
from dispatch.errors import DeviceUnavailable
from dispatch.world import ray_rendezvous
from dispatch.world.ray_rendezvous import JoinRequest, RendezvousActor


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(ray_rendezvous, "time", made)
    return made


def arrival(member, generation=0, awaited=(0, 1, 2), port=None, grace=5.0, host="a"):
    return JoinRequest(
        member, 3, generation, host, 1000 + member if port is None else port, awaited, grace, f"job {member}"
    )


def met(counter, *arrivals):
    """What each is told, once all have asked twice."""
    for each in arrivals:
        counter.join(each)
    return [counter.join(each) for each in arrivals]


def test_the_first_generation_is_of_all(clock):
    counter = RendezvousActor()
    assert [counter.join(arrival(member)) for member in (2, 0)] == [None, None]
    clock.now += 1000
    assert counter.join(arrival(0)) is None, "however long it takes: and who asks no more is not there"
    assert counter.join(arrival(1)) is None
    found = counter.join(arrival(2))
    assert (found.generation, found.job) == (0, "job 0")
    assert found.addresses == {member: ("127.0.0.1", 1000 + member) for member in range(3)}
    assert [counter.join(arrival(member)) for member in (0, 1)] == [found, found], (
        "an answer may be lost, and asked for"
    )


def test_those_that_live_wait_for_a_restarted_one_until_grace_is_over(clock):
    counter = RendezvousActor()
    met(counter, *map(arrival, range(3)))
    new = arrival(1, port=7)
    assert counter.join(new) is None, "the others have not begun a count"
    one, two = arrival(0, 1, port=5), arrival(2, 1, port=6, host="b")
    assert counter.join(one) is None
    found = counter.join(two)
    assert found.generation == 1
    assert found.addresses == {0: ("a", 5), 1: ("a", 7), 2: ("b", 6)}
    assert counter.join(new) == found
    later = [arrival(0, 2, port=8), arrival(2, 2, port=9)]
    assert met(counter, *later) == [None, None]
    clock.now += 4.9
    assert met(counter, *later) == [None, None]
    clock.now += 0.2
    found = counter.join(later[0])
    assert (list(found.addresses), found.generation) == ([0, 2], 2)
    assert counter.join(arrival(1, 2, port=10)).is_out, "it was silent for too long"
    assert counter.join(arrival(1, port=11)) is None, "as a new one it may come again"


def test_ranks_that_are_known_to_have_ended_are_not_waited_for(clock):
    assert clock.now
    counter = RendezvousActor()
    met(counter, *map(arrival, range(3)))
    assert counter.join(arrival(0, 1, port=5, awaited=(0, 2))) is None
    assert list(counter.join(arrival(2, 1, port=6, awaited=(0, 1, 2))).addresses) == [0, 2], "one of them knows"


def test_an_actor_that_was_made_anew_goes_on_with_the_generation_that_they_say(clock):
    assert clock.now
    counter = RendezvousActor()
    ours = [arrival(member, 4) for member in range(3)]
    found = [counter.join(each) for each in ours][-1]
    assert found.generation == 4


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for make in (lambda: dray.RaySupervisor("host"), lambda: dray.RayWorld(2), lambda: dray.RayPool(1)):
        with pytest.raises(DeviceUnavailable, match=r"pip install 'cudabind\[ray\]'"):
            make()
    with pytest.raises(DeviceUnavailable, match=r"pip install 'cudabind\[ray\]'"):
        dp.World.from_ray("name", 0, 1)


def test_without_pytorch_ranks_on_the_host_are_refused(monkeypatch):
    from dispatch.libraries.gloo.communicator import gloo

    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(DeviceUnavailable, match="mpirun has not started need PyTorch with gloo: pip install torch"):
        gloo()
