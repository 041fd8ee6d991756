"""How ranks meet, hear of one another's end, and agree on who is in: over sockets between threads of this process."""

import os
import socket
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

import dispatch as dp
from dispatch.core.communicator import Communicator
from dispatch.errors import BadRequest, CollectiveError, CollectiveTimeout, RankLeftOut, RankLost
from dispatch.world.membership import Membership, agree_on_members
from dispatch.world.mesh import SocketMesh, ThreadMesh, listen, receive_message, rendezvous, send_message
from dispatch.world.ranks import CommunicatorMaker, RankWorld
from dispatch.world.start import _leave_at_exit, from_env

HERE = "127.0.0.1"
WORD = "a word"


def free_port():
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def met(count, seconds=20):
    """The meshes of so many members, which have met as those of torchrun do."""
    port, until = free_port(), time.monotonic() + seconds

    def one(rank):
        own = listen()
        addresses, job = rendezvous(rank, count, (HERE, port), (HERE, own.getsockname()[1]), WORD, until)
        return SocketMesh.join(rank, addresses, own, job, until)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def agreed(meshes, candidates, grace=0.3, generation=1):
    """What each member agrees on, or the error that it gets."""

    def one(mesh):
        try:
            return agree_on_members(mesh, candidates, generation, grace, lambda members: f"id of {members}")
        except RankLeftOut as error:
            return error

    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(one, meshes))


def waited(condition):
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(1e-3)


def test_members_meet_and_hear_of_one_that_ends_without_a_word():
    meshes, told = met(4), []
    meshes[0].on_lost = told.append
    meshes[2].send(1, {"kind": "join", "generation": 3})
    assert meshes[1].take(lambda *_: True, time.monotonic() + 20, lambda: False) == (
        2,
        {"kind": "join", "generation": 3},
    )
    for line in meshes[3]._sockets.values():
        line.shutdown(socket.SHUT_RDWR)  # as the end of its process does
    waited(lambda: told == [3])
    waited(lambda: all(mesh.lost == {3} for mesh in meshes[:3]))
    meshes[3].close()
    begun = time.monotonic()
    found = agreed(meshes[:3], range(4), grace=30)
    assert time.monotonic() - begun < 10, "who is known to have ended is not waited for"
    assert {(each.members, each.generation, each.payload) for each in found} == {((0, 1, 2), 1, "id of 3")}
    for mesh in meshes[:3]:
        mesh.close()
        mesh.close()


def test_a_member_that_says_goodbye_is_not_lost_by_that():
    meshes, told = met(2), []
    meshes[0].on_lost = told.append
    meshes[1].close()
    waited(lambda: 1 in meshes[0].left and 1 in meshes[0].lost)
    assert told == []
    meshes[0].close()


@pytest.mark.parametrize("silent", [0, 2])
def test_who_is_silent_is_out_and_is_told_when_it_wakes_up(silent):
    shared = []
    meshes = [ThreadMesh(number, shared) for number in range(3)]
    present = [mesh for mesh in meshes if mesh.me != silent]
    found = agreed(present, range(3), grace=0.1)
    members = tuple(mesh.me for mesh in present)
    assert {each.members for each in found} == {members}
    assert len({each.payload for each in found}) == 1
    (late,) = agreed([meshes[silent]], range(3), grace=0.1)
    assert isinstance(late, RankLeftOut)


def test_the_latest_generation_that_is_proposed_counts():
    shared = []
    meshes = [ThreadMesh(number, shared) for number in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: agree_on_members(meshes[n], (0, 1), 1 + 2 * n, 5, str), range(2)))
    assert {(each.generation, each.members) for each in found} == {(3, (0, 1))}


def test_strangers_are_sent_away():
    own, until = listen(), time.monotonic() + 20
    address = (HERE, own.getsockname()[1])
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(SocketMesh.join, 0, {0: address, 1: address}, own, WORD, until)
        for message in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b""):
            with socket.create_connection(address) as line:
                line.sendall(message)
        with socket.create_connection(address) as line:
            send_message(line, {"kind": "hello", "member": 1, "job": "another"})
            with pytest.raises(ConnectionError):
                receive_message(line)
        friend = socket.create_connection(address)
        send_message(friend, {"kind": "hello", "member": 1, "job": WORD})
        mesh = joining.result(20)
    mesh.close()
    friend.close()


def test_ranks_that_do_not_come_are_a_timeout():
    port = free_port()
    with pytest.raises(CollectiveTimeout, match="1 of 2 ranks have connected to rank 0"):
        rendezvous(0, 2, (HERE, port), (HERE, 1), WORD, time.monotonic() + 0.1)
    with pytest.raises(CollectiveTimeout, match="nobody listens"):
        rendezvous(1, 2, (HERE, port), (HERE, 1), WORD, time.monotonic() + 0.1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "RANK: got unset"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: got 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"}, "device: got host"),
    ],
)
def test_variables_that_are_missing_are_named(variables, words, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match=words):
        dp.World.from_env("host", deadline=1)
    assert from_env is not None


def test_no_thread_is_left():
    assert not [thread for thread in threading.enumerate() if thread.name == "world mesh"]


# -- what has failed --------------------------------------------------------------------------------------------------
class Alone(Communicator):
    """A communicator that moves nothing."""

    library = "none"

    def stop(self):
        pass

    def release(self):
        pass

    def split(self, color, key=0):
        raise NotImplementedError


def worlds(meshes, generation=0):
    maker = CommunicatorMaker(lambda _: None, lambda of, rank, device, deadline: Alone(
        rank, len(of.members), device, generation=of.generation, deadline=deadline
    ))  # fmt: skip
    of = Membership(tuple(range(len(meshes))), generation, None)
    return [RankWorld(mesh, of, dp.device("host"), 20.0, maker) for mesh in meshes]


@pytest.mark.parametrize("kind", [CollectiveError, CollectiveTimeout])
def test_what_one_rank_gives_up_the_others_are_told_at_once(kind):
    meshes = met(3)
    sent, made = [], worlds(meshes)
    for mesh in meshes[1:]:
        mesh.send = lambda peer, message, send=mesh.send: sent.append(message) or send(peer, message)
    made[0].communicator.fail(kind("enough"))
    waited(lambda: all(world.communicator.error for world in made))
    for world in made[1:]:
        with pytest.raises(kind, match="member 0 has aborted: enough"):
            world.check()
    assert not sent, "who was told does not tell it on"
    for world in made:
        world.close()


def test_a_word_of_another_generation_and_a_rank_that_rebuilds_end_nothing():
    meshes = met(2)
    first, second = worlds(meshes, generation=3)
    meshes[0].send(1, {"kind": "failed", "generation": 2, "text": "old", "is_late": False})
    waited(lambda: 2 in meshes[1].failed)
    second.check()
    with ThreadPoolExecutor(2) as pool:  # the first gives its own communicator up long before the other does
        early = pool.submit(first.rebuild)
        waited(lambda: meshes[1].inbox or first.communicator.error)
        second.check()
        second.rebuild()
        early.result()
    for world in (first, second):
        world.check()
        assert world.generation == 4
        world.close()


def test_a_word_that_comes_before_its_generation_has_begun_counts():
    meshes = met(2)
    meshes[0].send(1, {"kind": "failed", "generation": 0, "text": "early", "is_late": True})
    waited(lambda: 0 in meshes[1].failed)
    with pytest.raises(CollectiveTimeout, match="early"):
        worlds(meshes)[1].check()
    for mesh in meshes:
        mesh.close()


@pytest.mark.parametrize(("counts", "process", "is_told"), [(True, 0, True), (False, 0, False), (True, 1, False)])
def test_at_the_end_of_its_program_a_rank_in_an_open_world_says_how_many_calls_it_has_made(
    monkeypatch, counts, process, is_told
):
    """Not if they are not counted, because the others may be in its last call; nor does a forked child."""
    monkeypatch.setattr(Alone, "counts_calls", counts)
    monkeypatch.delattr(sys, "last_value", raising=False)
    meshes = met(2)
    one, other = worlds(meshes)
    for world in (one, other):
        world.communicator.count_call()
    _leave_at_exit(weakref.ref(one), os.getpid() + process)
    assert ("calls" in one._mesh.goodbye) == is_told
    if is_told:
        with meshes[1].changed:
            assert meshes[1].changed.wait_for(lambda: 0 in meshes[1].goodbyes, 20)
        with pytest.raises(RankLost, match="rank 0 has closed its world, or ends, and does not make this call, nu"):
            other.communicator.count_call()
        assert other.communicator.error.has_closed
    for mesh in meshes:
        mesh.close()
