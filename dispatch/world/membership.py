"""Who is in the next generation of a world: those that come when they are asked, as one of them counts.

The lowest member that lives counts: the others tell it that they are there, and it tells them all who is in, once
everybody has come that is not known to have ended, or the time of grace is over. Who waits for it in vain takes the
next. All come within a deadline of one another, for the same failed collective brings them here; so who counts waits
for one such time, and who waits for it for two. A member that comes too late is told that it is out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.errors import RankLeftOut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dispatch.world.mesh import Mesh, Message

__all__ = ["Membership", "agree_on_members"]


class Membership(NamedTuple):
    """What all members of a generation are told."""

    members: tuple[int, ...]
    generation: int
    payload: Any


def agree_on_members(
    mesh: Mesh, candidates: Sequence[int], generation: int, grace: float, payload: Callable[[int], Any]
) -> Membership:
    """Take part in the count for a generation, or a later one where others propose that.

    `payload(members)` is called by the one who counts, with their number, for what the new communicator needs.
    RankLeftOut where the others have gone on without this member.
    """
    # The others may have counted, and even ended, while this one was silent.
    answer = mesh.take(lambda _, message: _is_answer(message, generation), 0.0, lambda: True)
    if answer is not None:
        return _accept_answer(mesh, *answer)
    for leader in sorted(candidates):
        if leader == mesh.me:
            return _count_members(mesh, [each for each in candidates if each != leader], generation, grace, payload)
        if leader in mesh.lost:
            continue
        mesh.send(leader, {"kind": "join", "generation": generation})
        answer = mesh.take(
            lambda _, message: _is_answer(message, generation),
            time.monotonic() + 2 * grace,
            lambda leader=leader: leader in mesh.lost,  # type: ignore[misc]
        )
        if answer is not None:
            return _accept_answer(mesh, *answer)
        mesh.send(leader, {"kind": "leave", "generation": generation})
    raise RankLeftOut(f"member {mesh.me} is no candidate for generation {generation}: {list(candidates)}")


def _is_answer(message: Message, generation: int) -> bool:
    return message["kind"] in ("members", "out") and message["generation"] >= generation


def _accept_answer(mesh: Mesh, leader: int, message: Message) -> Membership:
    me, members = mesh.me, tuple(message.get("members", ()))
    if message["kind"] == "out" or me not in members:
        mesh.on_message(leader, message)  # it is out however often it asks, and makes no world of its own
        who = f"member {leader} has made generation {message['generation']} of {list(members)}"
        raise RankLeftOut(f"member {me} was not heard in time: {who}")
    return Membership(members, message["generation"], message["payload"])


def _count_members(
    mesh: Mesh, others: Sequence[int], generation: int, grace: float, payload: Callable[[int], Any]
) -> Membership:
    """Wait for the others, and tell all who is in."""
    until, joined = time.monotonic() + grace, {mesh.me: generation}

    def is_complete() -> bool:
        return all(each in joined or each in mesh.lost for each in others)

    def concerns(_: int, message: Message) -> bool:
        return message["kind"] in ("join", "leave", "out", "members") and message["generation"] >= generation

    while not is_complete():
        found = mesh.take(concerns, until, is_complete)
        if found is None:
            break
        peer, message = found
        if message["kind"] in ("out", "members"):  # others have counted: this one was silent for too long
            return _accept_answer(mesh, peer, message)
        if message["kind"] == "join" and peer in others:
            joined[peer] = message["generation"]
        else:
            joined.pop(peer, None)
    members = tuple(sorted(each for each in joined if each not in mesh.lost))
    agreed = Membership(members, max(joined.values()), payload(len(members)))
    for peer in others:
        kind = "members" if peer in members else "out"
        answer = {"kind": kind, "generation": agreed.generation, "members": list(members)}
        mesh.send(peer, answer | ({"payload": agreed.payload} if kind == "members" else {}))
    return agreed
