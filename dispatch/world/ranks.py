"""RankWorld: one rank's view of all ranks of a program: their present communicator, and how to make the next one.

`start.py` and `local.py` create RankWorlds; for users the class is `World`. A communicator of NCCL, MPI, gloo or
threads moves the data; a mesh detects which ranks are alive. A world makes no collective call itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dispatch.checks import check_number
from dispatch.device.failed_collectives import clear_failed
from dispatch.errors import CollectiveError, CollectiveTimeout, RankLost
from dispatch.world.membership import agree_on_members

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from dispatch.core.communicator import Communicator
    from dispatch.device.device import Device
    from dispatch.world.membership import Membership
    from dispatch.world.mesh import Mesh

__all__ = ["CommunicatorMaker", "RankWorld"]

LONGEST_TEXT = 2000  # characters of an error that are sent to the other ranks


class CommunicatorMaker:
    """How a kind of world makes its communicators.

    `payload` is called on one member, for the data that `make` then needs on all of them.
    """

    def __init__(
        self, payload: Callable[[int], Any], make: Callable[[Membership, int, Device, float], Communicator]
    ) -> None:
        self.payload, self.make = payload, make


class RankWorld:
    """The implementation of `World`, however its ranks were started."""

    def __init__(
        self,
        mesh: Mesh,
        agreed: Membership,
        device: Device,
        deadline: float,
        maker: CommunicatorMaker,
        regroup: Callable[[Any, Sequence[int], int, float], tuple[Mesh, Membership]] | None = None,
    ) -> None:
        """`regroup(mesh, members, generation, seconds)` makes a new mesh, for worlds whose ranks are restarted."""
        self._maker, self.deadline, self.device = maker, deadline, device
        self._regroup = regroup
        self.closed = False
        self._attach_mesh(mesh)
        self._start_generation(agreed)

    # -- the present generation -----------------------------------------------------------------------------------
    def _attach_mesh(self, mesh: Mesh) -> None:
        mesh.on_lost, mesh.on_failed = self._on_member_lost, self._on_member_failed
        mesh.on_left = self._on_member_left
        self._mesh = mesh

    def _start_generation(self, agreed: Membership) -> None:
        self.members, self.generation = agreed.members, agreed.generation
        self.rank, self.size = agreed.members.index(self._mesh.me), len(agreed.members)
        self.communicator = self._maker.make(agreed, self.rank, self.device, self.deadline)
        self.communicator.watchers.append(self._announce_failure)
        for member in self._mesh.lost & set(agreed.members) - self._mesh.left:
            self._on_member_lost(member)  # since the agreement
        for member in tuple(self._mesh.goodbyes):
            self._on_member_left(member)
        self._on_member_failed(agreed.generation)

    def _on_member_lost(self, member: int) -> None:
        """Fail the communicator at once if one of its ranks has ended."""
        communicator = getattr(self, "communicator", None)
        if communicator is None or member not in self.members or self.closed:
            return
        rank = self.members.index(member)
        text = f"generation {self.generation}: rank {rank} of {self.size}, member {member}, has ended"
        communicator.fail(RankLost(text, (rank,)))

    def _on_member_left(self, member: int) -> None:
        """Fail the communicator as soon as it waits for a rank that has closed its world.

        Other ranks may still be in the last call of that rank, whose data has been sent: calls are counted.
        """
        communicator, goodbye = getattr(self, "communicator", None), self._mesh.goodbyes[member]
        if communicator is None or goodbye.get("generation") != self.generation or member not in self.members:
            return
        communicator.on_rank_left(self.members.index(member), goodbye["calls"])

    def _on_member_failed(self, generation: int) -> None:
        """Fail the communicator at once if another rank's has failed, because its next call would never end."""
        entry, communicator = self._mesh.failed.get(generation), getattr(self, "communicator", None)
        if entry is None or communicator is None or generation != self.generation or self.closed:
            return
        member, message = entry
        kind = CollectiveTimeout if message["is_late"] else CollectiveError
        communicator.fail(kind(f"{communicator!r}: member {member} has aborted: {message['text']}"))

    def _announce_failure(self, error: CollectiveError) -> None:
        """Send a failure to the other ranks, unless they have reported it themselves."""
        mesh, generation = self._mesh, self.generation
        if isinstance(error, RankLost) or mesh.has_failed or generation in mesh.failed:
            return  # all ranks notice the end of a rank by its connections
        message = {"kind": "failed", "generation": generation, "text": str(error)[:LONGEST_TEXT]}
        for member in self.members:
            if member != mesh.me:
                mesh.send(member, {**message, "is_late": isinstance(error, CollectiveTimeout)})

    def check(self) -> None:
        """Raise the error of the present communicator, if it has failed."""
        self.communicator.check()

    def abort(self, why: str = "it was aborted") -> None:
        """End running collectives, here and on the other ranks, which are notified. Call `rebuild` to continue."""
        self.communicator.abort(why)

    def rebuild(self, *, grace: float | None = None) -> Self:
        """Make the next communicator over the living ranks, all of which call this; returns the world itself.

        Running collectives are ended first. It waits `grace` seconds for the ranks, by default the deadline; one that
        comes later gets RankLeftOut. This rank's memory is unchanged, except for outputs of failed collectives.
        CollectiveError if a rank is lost meanwhile: call it again.
        """
        if grace is not None:
            check_number("grace", grace, low=0.0, high=1e9)
        old = self.communicator
        if self._announce_failure in old.watchers:  # other ranks may still be in a call that succeeds
            old.watchers.remove(self._announce_failure)
        old.fail(CollectiveError(f"{old!r} was aborted to rebuild its world"))
        until = self.deadline if grace is None else grace
        if self._regroup is None:
            candidates = [member for member in self.members if member not in self._mesh.left]
            agreed = agree_on_members(self._mesh, candidates, self.generation + 1, until, self._maker.payload)
        else:
            mesh, agreed = self._regroup(self._mesh, self.members, self.generation + 1, until)
            self._attach_mesh(mesh)
        self.generation = agreed.generation  # even if the following fails, because each agreement needs a new number
        old.close()
        clear_failed(self.device, old)
        self._start_generation(agreed)
        return self

    # -- the end ------------------------------------------------------------------------------------------------------
    def announce_end(self) -> None:
        """Tell the other ranks that this one makes no further calls, without closing anything; at the program's end.

        Other ranks may still be in their last call with this one, so this is done only if calls are counted. If not,
        or if the communicator has failed, they notice the end of the process.
        """
        error = self.communicator.error
        if self.communicator.counts_calls and (error is None or error.has_closed):
            self._say_goodbye()

    def _say_goodbye(self) -> None:
        self._mesh.leave(generation=self.generation, calls=self.communicator.calls)

    def close(self) -> None:
        """Close the communicator and leave; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self._say_goodbye()  # before MPI waits to free the communicator
            self.communicator.close()
            clear_failed(self.device, self.communicator)
            self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._mesh.has_failed = True
            self.communicator.fail(CollectiveError(f"rank {self.rank} left its world with {type(error).__name__}"))
        self.close()

    def __repr__(self) -> str:
        return f"<World: rank {self.rank} of {self.size} on {self.device}, generation {self.generation}>"
