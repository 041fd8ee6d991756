"""Worlds of processes that torchrun (by environment variables) or MPI has started and numbered."""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import sys
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dispatch.checks import check_int, check_number, shown
from dispatch.core.timeout import call_with_timeout
from dispatch.device.device import Device
from dispatch.device.registry import device as device_of
from dispatch.errors import BadRequest, RankLost
from dispatch.world.membership import Membership
from dispatch.world.mesh import SocketMesh, listen, rendezvous
from dispatch.world.ranks import CommunicatorMaker, RankWorld

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dispatch.core.communicator import Communicator
    from dispatch.libraries.mpi.communicator import MpiCommunicator
    from dispatch.libraries.nccl.config import NcclConfig

__all__ = ["first_membership", "from_env", "from_mpi", "nccl_maker", "resolve_device"]

W = TypeVar("W", bound=RankWorld)


def resolve_device(device: Device | str | None, usual: str) -> Device:
    """The device, from a device or its name; None stands for `usual`."""
    return device if isinstance(device, Device) else device_of(usual if device is None else device)


def close_at_exit(world: W) -> W:
    """Register the world for the end of the program; returns the world.

    If an exception ends the program, the world is closed with it, else the other ranks are told that this one makes no
    further calls. Otherwise they would wait for their deadlines, because MPI_Finalize keeps this process and its
    connections for them. Exit handlers that were registered before must not make collective calls.
    """
    atexit.register(
        _leave_at_exit, weakref.ref(world), os.getpid()
    )  # registered after the handler of libraries/mpi/process_exit.py, so called before it
    return world


def _leave_at_exit(world: weakref.ref[RankWorld], process: int) -> None:
    error, target = getattr(sys, "last_value", None), world()
    if target is None or target.closed or os.getpid() != process:  # a forked child has the connections of its parent
        return
    if error is not None:
        target.__exit__(type(error), error, None)
    else:
        target.announce_end()


# -- NCCL, for all kinds of worlds ------------------------------------------------------------------------------------
def nccl_maker(config: NcclConfig | None = None) -> CommunicatorMaker:
    """Makes communicators of NCCL; one member gets the unique id."""
    return CommunicatorMaker(_new_id, partial(_make_nccl, config))


def _new_id(members: int) -> str:
    from dispatch.libraries.nccl.communicator import unique_id

    del members
    return unique_id().hex()


def _make_nccl(
    config: NcclConfig | None, agreed: Membership, rank: int, device: Device, deadline: float
) -> Communicator:
    from dispatch.libraries.nccl.communicator import NcclCommunicator

    identity, generation = bytes.fromhex(agreed.payload), agreed.generation
    return NcclCommunicator.create(
        device, rank, len(agreed.members), identity, config, generation=generation, deadline=deadline
    )


def first_membership(
    mesh: SocketMesh, members: Sequence[int], generation: int, maker: CommunicatorMaker, until: float
) -> Membership:
    """The first membership of a mesh, which its first member sends to the others; RankLost if it does not."""
    leader, others = members[0], members[1:]
    if mesh.me == leader:
        agreed = Membership(tuple(members), generation, maker.payload(len(members)))
        for peer in others:
            membership_message = {
                "kind": "members",
                "generation": generation,
                "members": list(members),
                "payload": agreed.payload,
            }
            mesh.send(peer, membership_message)
        return agreed
    received = mesh.take(lambda _, message: message["kind"] == "members", until, lambda: leader in mesh.lost)
    if received is None:
        raise RankLost(f"rank 0, member {leader}, has not sent the communicator's identifier before the deadline", (0,))
    return Membership(tuple(members), generation, received[1]["payload"])


# -- torchrun's variables ---------------------------------------------------------------------------------------------
def from_env(
    kind: type[W], device: Device | str | None, deadline: float, port: int | None, config: NcclConfig | None
) -> W:
    """`World.from_env`."""
    check_number("deadline", deadline, low=1e-3, high=1e9)
    until = time.monotonic() + deadline
    rank, size = _number(os.environ, "RANK"), _number(os.environ, "WORLD_SIZE")
    home = resolve_device(device, f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
    if home.is_host:
        hint = "mpirun -n 4 python program.py and World.from_mpi(), or World.local(['host'] * 4)"
        raise BadRequest("device", "host", "a GPU, because such a world uses NCCL", hint)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    at = check_int("port", _number(os.environ, "MASTER_PORT") + 1 if port is None else port, 1, 65535)
    listener = listen()
    addresses, job = rendezvous(
        rank, size, (master, at), (_own_host(master), listener.getsockname()[1]), _new_token(), until
    )
    mesh = SocketMesh.join(rank, addresses, listener, job, until)
    try:
        maker = nccl_maker(config)
        return close_at_exit(kind(mesh, first_membership(mesh, range(size), 0, maker, until), home, deadline, maker))
    except BaseException:
        mesh.close()
        raise


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name)
    if text is None or not text.isdecimal():
        hint = "torchrun --nproc-per-node 2 program.py sets it"
        raise BadRequest(name, "unset" if text is None else repr(text), "a number in the environment", hint)
    return int(text)


def _new_token() -> str:
    return secrets.token_hex(16)


def _own_host(towards: str) -> str:
    """This machine's address for connections from another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        host: str = probe.getsockname()[0]
    return host


# -- MPI --------------------------------------------------------------------------------------------------------------
def from_mpi(kind: type[W], comm: Any, device: Device | str | None, deadline: float, config: NcclConfig | None) -> W:
    """`World.from_mpi`."""
    from dispatch.libraries.mpi.communicator import MpiCommunicator, mpi

    check_number("deadline", deadline, low=1e-3, high=1e9)
    until, home = time.monotonic() + deadline, resolve_device(device, "host")
    communicator = mpi().COMM_WORLD if comm is None else comm
    if not isinstance(communicator, mpi().Intracomm):
        hint = "mpi4py.MPI.COMM_WORLD, which None stands for, or a Split of it"
        raise BadRequest("comm", shown(comm), "a communicator of mpi4py", hint)
    listener = listen()
    own_entry = (socket.gethostname(), listener.getsockname()[1], _new_token())
    entries = call_with_timeout(deadline, partial(communicator.allgather, own_entry), "the rendezvous of all ranks")
    job = entries[0][2]
    is_one_host = len({host for host, _, _ in entries}) == 1
    addresses = {member: ("127.0.0.1" if is_one_host else host, port) for member, (host, port, _) in enumerate(entries)}
    mesh = SocketMesh.join(communicator.rank, addresses, listener, job, until)
    try:
        if home.is_host:
            host = device_of("host")
            one = MpiCommunicator.duplicate(communicator, host, f"dispatch {job}", deadline=deadline)
            agreed = Membership(tuple(range(communicator.size)), 0, None)
            return close_at_exit(kind(mesh, agreed, home, deadline, _mpi_maker(one)))
        maker = nccl_maker(config)
        agreed = first_membership(mesh, range(communicator.size), 0, maker, until)
        return close_at_exit(kind(mesh, agreed, home, deadline, maker))
    except BaseException:
        mesh.close()
        raise


def _mpi_maker(original: MpiCommunicator) -> CommunicatorMaker:
    """Makes communicators of MPI, of processes of the original one."""

    def make(agreed: Membership, rank: int, device: Device, deadline: float) -> Communicator:
        del rank, device
        return (
            original
            if agreed.generation == 0
            else original.regroup(_numbers(agreed.members), agreed.generation, deadline)
        )

    return CommunicatorMaker(lambda _: None, make)


def _numbers(members: Sequence[int]) -> list[int]:
    return list(members)
