"""Worlds whose ranks are Ray's actors, which Ray starts, and anew where they end. NCCL moves the data, or gloo."""

from __future__ import annotations

import os
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dispatch.checks import check_bool, check_int, check_number
from dispatch.errors import BadRequest
from dispatch.world.mesh import SocketMesh, listen
from dispatch.world.ranks import Maker, RankWorld
from dispatch.world.ray_meeting import Arrival, arrive, left_out, ray
from dispatch.world.start import first, nccl_maker, on

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.communicator import Communicator
    from dispatch.device.device import Device
    from dispatch.libraries.nccl.config import NcclConfig
    from dispatch.world.membership import Agreed
    from dispatch.world.mesh import Mesh

__all__ = ["from_ray", "own_device"]

W = TypeVar("W", bound=RankWorld)
SHOW_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # with it Ray leaves CUDA_VISIBLE_DEVICES as it is
CONNECTING = 20.0  # seconds at most: all listen before they come, so who does not connect has ended


def from_ray(
    kind: type[W],
    name: str,
    rank: int,
    size: int,
    device: Device | str | None,
    deadline: float,
    config: NcclConfig | None,
    restarts: bool,
) -> W:
    """`World.from_ray`."""
    check_number("deadline", deadline, low=1e-3, high=1e9)
    check_int("size", size, 1, 1 << 20)
    check_int("rank", rank, 0, size - 1)
    check_bool("restarts", restarts)
    if not name or str(name) != name:
        raise BadRequest("name", repr(name), "a word that only the ranks of this world use")
    if not ray().is_initialized():
        hint = "call it in a method of an actor; dispatch.ray.RayWorld starts actors"
        raise BadRequest(
            "world", "a process without Ray", "an actor of Ray, or a process that has called ray.init", hint
        )
    until, home = time.monotonic() + deadline, on(device, own_device())
    host = ray().util.get_node_ip_address()
    maker = _gloo_maker(host) if home.is_host else nccl_maker(config)
    regroup = partial(_regroup, name, rank, size, host, maker, restarts, deadline)
    mesh, agreed = _come(name, Arrival(rank, size, 0, host, 0, tuple(range(size)), deadline, _word()), maker, until)
    try:
        return kind(mesh, agreed, home, deadline, maker, regroup)
    except BaseException:
        mesh.close()
        raise


def _word() -> str:
    return secrets.token_hex(16)


def own_device() -> str:
    """The first GPU of those that Ray has given this actor: it shows the process no others, unless told not to."""
    given = ray().get_runtime_context().get_accelerator_ids().get("GPU")
    if not given:
        return "host"
    is_shown_all = os.environ.get(SHOW_ALL, "0").lower() in ("1", "true")
    return f"cuda:{given[0]}" if is_shown_all else "cuda:0"


def _come(name: str, arrival: Arrival, maker: Maker, until: float) -> tuple[SocketMesh, Agreed]:
    """Meet the others, and connect to all of them."""
    own = listen()
    try:
        counted = arrive(name, arrival._replace(port=own.getsockname()[1]), until)
    except BaseException:
        own.close()
        raise
    soon = time.monotonic() + min(CONNECTING, arrival.grace)
    mesh = SocketMesh.join(arrival.member, counted.addresses, own, counted.job, soon)
    try:
        return mesh, first(mesh, list(counted.addresses), counted.generation, maker, soon)
    except BaseException:
        mesh.close()
        raise


def _regroup(
    name: str,
    me: int,
    size: int,
    host: str,
    maker: Maker,
    restarts: bool,
    deadline: float,
    old: Mesh,
    members: Sequence[int],
    generation: int,
    grace: float,
) -> tuple[Mesh, Agreed]:
    """The next mesh, of those that come within `grace` seconds; RankLeftOut where they have met without this one."""
    told = old.take(lambda _, message: message["kind"] == "out", 0.0, lambda: True)
    if told is not None:
        old.received(*told)  # it is out however often it asks
        raise left_out(me, told[1]["generation"], told[1]["members"])
    expected = range(size) if restarts else [each for each in members if each not in old.lost]
    awaited = tuple(each for each in expected if each not in old.left)
    arrival = Arrival(me, size, generation, host, 0, awaited, grace, _word())
    mesh, agreed = _come(name, arrival, maker, time.monotonic() + grace + deadline)
    for peer in members:
        if peer not in agreed.members:
            old.send(peer, {"kind": "out", "generation": agreed.generation, "members": list(agreed.members)})
    old.close()
    return mesh, agreed


def _gloo_maker(host: str) -> Maker:
    """Communicators of gloo, whose ranks meet at a store that one of them serves, each at its own address."""
    from dispatch.libraries.gloo.communicator import GlooCommunicator, Meeting, gloo, serve

    gloo()
    served: list[Any] = []  # the newest: a store ends where nobody holds it

    def payload(members: int) -> list[Any]:
        del members
        store = serve(host, 60.0)
        served[:] = [store]
        return [host, store.port, _word()]

    def make(agreed: Agreed, rank: int, device: Device, deadline: float) -> Communicator:
        meeting, size = Meeting(*agreed.payload), len(agreed.members)
        return GlooCommunicator.create(
            device, rank, size, meeting, host, generation=agreed.generation, deadline=deadline
        )

    return Maker(payload, make)
