"""Agreement on the members of the next generation of a world.

The lowest living member is the leader: the others send it a "join" message, and it sends the list of members to all,
once every member has joined whose end is not known, or the grace period is over. A member that gets no answer
from a leader tries the next one. All members come here within one deadline of one another, because the same failed
collective brings them here; so a leader waits for one grace period, and the others wait for two. A member that joins
too late gets an answer that it is out.
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
    """What the leader sends to all members of a generation."""

    members: tuple[int, ...]
    generation: int
    payload: Any


def agree_on_members(
    mesh: Mesh, candidates: Sequence[int], generation: int, grace: float, payload: Callable[[int], Any]
) -> Membership:
    """Take part in the agreement on a generation, or on a later one if others propose that.

    The leader calls `payload(count)`, with the number of members, for the data that the new communicator needs.
    RankLeftOut if the others have continued without this member.
    """
    # The others may have agreed, and even ended, while this member was silent.
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
    raise RankLeftOut(f"member {mesh.me} is not a candidate for generation {generation}: {list(candidates)}")


def _is_answer(message: Message, generation: int) -> bool:
    return message["kind"] in ("members", "out") and message["generation"] >= generation


def _accept_answer(mesh: Mesh, leader: int, message: Message) -> Membership:
    me, members = mesh.me, tuple(message.get("members", ()))
    if message["kind"] == "out" or me not in members:
        mesh.on_message(leader, message)  # keep the answer: asking again does not change it
        who = f"member {leader} has formed generation {message['generation']} of {list(members)}"
        raise RankLeftOut(f"member {me} was not heard by its deadline: {who}")
    return Membership(members, message["generation"], message["payload"])


def _count_members(
    mesh: Mesh, others: Sequence[int], generation: int, grace: float, payload: Callable[[int], Any]
) -> Membership:
    """As the leader: wait for the others, and send the membership to all."""
    until, joined = time.monotonic() + grace, {mesh.me: generation}

    def is_complete() -> bool:
        return all(each in joined or each in mesh.lost for each in others)

    def concerns(_: int, message: Message) -> bool:
        return message["kind"] in ("join", "leave", "out", "members") and message["generation"] >= generation

    while not is_complete():
        received = mesh.take(concerns, until, is_complete)
        if received is None:
            break
        peer, message = received
        if message["kind"] in ("out", "members"):  # others have agreed: this member was silent for too long
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
