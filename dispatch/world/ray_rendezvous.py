"""The rendezvous of Ray actors that are the ranks of a world: a named actor, which all ranks poll.

It determines the members of the next generation: once all awaited ranks have joined, or the grace period is over, it
answers each of them with the members and their addresses. A request to join contains all that is needed, so a
rendezvous actor that Ray has restarted, or that another rank has created again, continues without other state. It
carries no data, and makes no communicator.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.errors import CollectiveTimeout, DeviceUnavailable, RankLeftOut

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["JoinRequest", "RendezvousActor", "RendezvousResult", "join_rendezvous", "ray", "rendezvous_actor"]

SHORTEST, LONGEST = 0.02, 0.25  # seconds between two polls
SILENT_SECONDS = 10.0  # seconds without a poll after which a rank counts as ended; also the timeout of an answer


def ray() -> Any:
    """The module `ray`; DeviceUnavailable if it is not installed."""
    try:
        import ray as found
    except ImportError as error:
        requirement = "ranks and supervisors in Ray actors need Ray: pip install 'cudabind[ray]'"
        raise DeviceUnavailable(f"{requirement}; {error}") from error
    return found


class JoinRequest(NamedTuple):
    """A member's request to join.

    `generation` is the smallest in which it can take part, 0 for a new member; `awaited` are the
    members for which it waits, up to `grace` seconds. A new member waits until an old one starts a round, or until all
    have joined.
    """

    member: int
    size: int
    generation: int
    host: str
    port: int
    awaited: tuple[int, ...]
    grace: float
    job: str


class RendezvousResult(NamedTuple):
    """The answer to all members: their addresses, the generation, and a token that only they know.

    `is_out` is true for a member that is left out.
    """

    addresses: dict[int, tuple[str, int]]
    generation: int
    job: str
    is_out: bool = False

    @property
    def ports(self) -> dict[int, int]:
        """The port of each member."""
        return {member: port for member, (_, port) in self.addresses.items()}


class RendezvousActor:
    """The rendezvous actor. Members that have joined poll it; one that stops polling counts as ended."""

    def __init__(self) -> None:
        self._joined: dict[int, tuple[JoinRequest, float]] = {}  # the requests, with the time of the last poll
        self._last: RendezvousResult | None = None
        self._round_start = math.inf  # when a member of an earlier generation first joined

    def join(self, joining: JoinRequest) -> RendezvousResult | None:
        """Join the next round; None until it has ended."""
        last, now = self._last, time.monotonic()
        if last is not None and last.ports.get(joining.member) == joining.port:
            return last
        if last is not None and 0 < joining.generation <= last.generation and joining.member not in last.addresses:
            return last._replace(is_out=True)
        self._joined[joining.member] = joining, now
        self._joined = {member: entry for member, entry in self._joined.items() if now - entry[1] < SILENT_SECONDS}
        with_generation = [each for each, _ in self._joined.values() if each.generation]
        self._round_start = min(self._round_start, now) if with_generation else math.inf
        awaited = [set(each.awaited) for each in with_generation] or [set(range(joining.size))]
        is_complete = set.intersection(*awaited) <= self._joined.keys()
        if not is_complete and now < self._round_start + max(
            (each.grace for each in with_generation), default=math.inf
        ):
            return None
        return self._end_round()

    def leave(self, member: int, port: int) -> None:
        """Remove a member that has stopped waiting."""
        entry = self._joined.get(member)
        if entry is not None and entry[0].port == port:
            del self._joined[member]

    def _end_round(self) -> RendezvousResult:
        joined = sorted((joining for joining, _ in self._joined.values()), key=lambda one: one.member)
        is_one_host = len({each.host for each in joined}) == 1
        addresses = {each.member: ("127.0.0.1" if is_one_host else each.host, each.port) for each in joined}
        previous = -1 if self._last is None else self._last.generation
        generation = max(previous + 1, *(each.generation for each in joined), 0)
        self._joined, self._round_start = {}, math.inf
        self._last = RendezvousResult(addresses, generation, joined[0].job)
        return self._last


def rendezvous_actor(name: str) -> Any:
    """The handle of the rendezvous actor of the world with this name; creates the actor if there is none."""
    options = {"num_cpus": 0, "max_restarts": -1}
    return ray().remote(RendezvousActor).options(name=f"dispatch world {name}", get_if_exists=True, **options).remote()


def join_rendezvous(name: str, joining: JoinRequest, until: float) -> RendezvousResult:
    """Join the rendezvous of a world, and return its result; raises CollectiveTimeout or RankLeftOut."""
    module, actor, pause = ray(), None, SHORTEST
    broken = (module.exceptions.RayActorError, module.exceptions.GetTimeoutError, ValueError)
    why = "the other ranks did not join before its deadline"
    while time.monotonic() < until:
        try:
            if actor is None:
                actor = rendezvous_actor(name)
            result: RendezvousResult | None = module.get(actor.join.remote(joining), timeout=SILENT_SECONDS)
        except broken as error:  # the actor ended with its creator, or its answer was lost: try again
            actor, result, why = None, None, f"the rendezvous actor does not answer: {error}"
        if result is not None and result.is_out:
            raise left_out_error(joining.member, result.generation, result.addresses)
        if result is not None:
            return result
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST)
    if actor is not None:
        actor.leave.remote(joining.member, joining.port)
    raise CollectiveTimeout(f"world {name!r}: member {joining.member} of {joining.size}: {why}")


def left_out_error(member: int, generation: int, members: Iterable[int]) -> RankLeftOut:
    """The error for a member that has joined too late."""
    return RankLeftOut(f"member {member} was not heard by its deadline: generation {generation} is {sorted(members)}")
