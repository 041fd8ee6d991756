"""Worlds whose ranks are Ray actors, which Ray starts and restarts. NCCL moves the data, on the host gloo."""

from __future__ import annotations

import os
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dispatch.checks import check_bool, check_int, check_number
from dispatch.errors import BadRequest
from dispatch.world.mesh import SocketMesh, listen
from dispatch.world.ranks import CommunicatorMaker, RankWorld
from dispatch.world.ray_rendezvous import JoinRequest, join_rendezvous, left_out_error, ray
from dispatch.world.start import first_membership, nccl_maker, resolve_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dispatch.core.communicator import Communicator
    from dispatch.device.device import Device
    from dispatch.libraries.nccl.config import NcclConfig
    from dispatch.world.membership import Membership
    from dispatch.world.mesh import Mesh

__all__ = ["actor_device", "from_ray"]

W = TypeVar("W", bound=RankWorld)
KEEP_VISIBLE_DEVICES = (
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"  # with this variable Ray does not change CUDA_VISIBLE_DEVICES
)
CONNECT_TIMEOUT = 20.0  # seconds at most: ranks listen before they join, so one that cannot be reached has ended


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
        raise BadRequest("name", repr(name), "a name that only the ranks of this world use")
    if not ray().is_initialized():
        hint = "call it in a method of an actor; dispatch.ray.RayWorld starts actors"
        raise BadRequest(
            "world", "a process without Ray", "an actor of Ray, or a process that has called ray.init", hint
        )
    until, home = time.monotonic() + deadline, resolve_device(device, actor_device())
    host = ray().util.get_node_ip_address()
    maker = _gloo_maker(host) if home.is_host else nccl_maker(config)
    regroup = partial(_regroup, name, rank, size, host, maker, restarts, deadline)
    mesh, agreed = _connect_all(
        name, JoinRequest(rank, size, 0, host, 0, tuple(range(size)), deadline, _new_token()), maker, until
    )
    try:
        return kind(mesh, agreed, home, deadline, maker, regroup)
    except BaseException:
        mesh.close()
        raise


def _new_token() -> str:
    return secrets.token_hex(16)


def actor_device() -> str:
    """The first GPU that Ray assigned to this actor, or "host"; Ray usually hides all other GPUs from the process."""
    gpu_ids = ray().get_runtime_context().get_accelerator_ids().get("GPU")
    if not gpu_ids:
        return "host"
    is_shown_all = os.environ.get(KEEP_VISIBLE_DEVICES, "0").lower() in ("1", "true")
    return f"cuda:{gpu_ids[0]}" if is_shown_all else "cuda:0"


def _connect_all(
    name: str, joining: JoinRequest, maker: CommunicatorMaker, until: float
) -> tuple[SocketMesh, Membership]:
    """Join the rendezvous, and connect to all other ranks."""
    listener = listen()
    try:
        result = join_rendezvous(name, joining._replace(port=listener.getsockname()[1]), until)
    except BaseException:
        listener.close()
        raise
    soon = time.monotonic() + min(CONNECT_TIMEOUT, joining.grace)
    mesh = SocketMesh.join(joining.member, result.addresses, listener, result.job, soon)
    try:
        return mesh, first_membership(mesh, list(result.addresses), result.generation, maker, soon)
    except BaseException:
        mesh.close()
        raise


def _regroup(
    name: str,
    me: int,
    size: int,
    host: str,
    maker: CommunicatorMaker,
    restarts: bool,
    deadline: float,
    old: Mesh,
    members: Sequence[int],
    generation: int,
    grace: float,
) -> tuple[Mesh, Membership]:
    """The next mesh, of the ranks that join within `grace` seconds; RankLeftOut if they went on without this one."""
    answer = old.take(lambda _, message: message["kind"] == "out", 0.0, lambda: True)
    if answer is not None:
        old.on_message(*answer)  # keep the answer: asking again does not change it
        raise left_out_error(me, answer[1]["generation"], answer[1]["members"])
    expected = range(size) if restarts else [each for each in members if each not in old.lost]
    awaited = tuple(each for each in expected if each not in old.left)
    joining = JoinRequest(me, size, generation, host, 0, awaited, grace, _new_token())
    mesh, agreed = _connect_all(name, joining, maker, time.monotonic() + grace + deadline)
    for peer in members:
        if peer not in agreed.members:
            old.send(peer, {"kind": "out", "generation": agreed.generation, "members": list(agreed.members)})
    old.close()
    return mesh, agreed


def _gloo_maker(host: str) -> CommunicatorMaker:
    """Makes communicators of gloo, whose ranks meet at a store that one of them serves."""
    from dispatch.libraries.gloo.communicator import GlooCommunicator, StoreAddress, gloo, serve_store

    gloo()
    served: list[Any] = []  # the newest store, which ends when it is not referenced any more

    def payload(members: int) -> list[Any]:
        del members
        store = serve_store(host, 60.0)
        served[:] = [store]
        return [host, store.port, _new_token()]

    def make(agreed: Membership, rank: int, device: Device, deadline: float) -> Communicator:
        address, size = StoreAddress(*agreed.payload), len(agreed.members)
        return GlooCommunicator.create(
            device, rank, size, address, host, generation=agreed.generation, deadline=deadline
        )

    return CommunicatorMaker(payload, make)
