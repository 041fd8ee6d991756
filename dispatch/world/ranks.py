"""RankWorld: this rank among all ranks of a program, the communicator that they have now, and the next one.

`start.py` and `local.py` make them, and users know them as `World`. What carries data is a communicator of NCCL, MPI or
threads, and what finds out who lives is a mesh. A world makes no collective call itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

LONGEST_TEXT = 2000  # characters of an error that the others are told


class CommunicatorMaker:
    """How a kind of world makes its communicators.

    `payload` is called on one member, for what `make` then needs on all of them.
    """

    def __init__(
        self, payload: Callable[[int], Any], make: Callable[[Membership, int, Device, float], Communicator]
    ) -> None:
        self.payload, self.make = payload, make


class RankWorld:
    """What a `World` is, however it began."""

    def __init__(
        self,
        mesh: Mesh,
        agreed: Membership,
        device: Device,
        deadline: float,
        maker: CommunicatorMaker,
        regroup: Callable[[Any, Sequence[int], int, float], tuple[Mesh, Membership]] | None = None,
    ) -> None:
        """`regroup` finds another mesh and its members, of a generation and within a time, where ranks come anew."""
        self._maker, self.deadline, self.device = maker, deadline, device
        self._regroup = regroup
        self.closed = False
        self._attach_mesh(mesh)
        self._start_generation(agreed)

    # -- the present generation -----------------------------------------------------------------------------------
    def _attach_mesh(self, mesh: Mesh) -> None:
        mesh.on_lost, mesh.on_failed = self._on_member_lost, self._on_member_failed
        self._mesh = mesh

    def _start_generation(self, agreed: Membership) -> None:
        self.members, self.generation = agreed.members, agreed.generation
        self.rank, self.size = agreed.members.index(self._mesh.me), len(agreed.members)
        self.communicator = self._maker.make(agreed, self.rank, self.device, self.deadline)
        self.communicator.watchers.append(self._announce_failure)
        for member in self._mesh.lost & set(agreed.members) - self._mesh.left:
            self._on_member_lost(member)  # between the count and now
        self._on_member_failed(agreed.generation)

    def _on_member_lost(self, member: int) -> None:
        """Have the communicator fail at once where one of its ranks has ended."""
        communicator = getattr(self, "communicator", None)
        if communicator is None or member not in self.members or self.closed:
            return
        rank = self.members.index(member)
        text = f"generation {self.generation}: rank {rank} of {self.size}, member {member}, has ended"
        communicator.fail(RankLost(text, (rank,)))

    def _on_member_failed(self, generation: int) -> None:
        """Have the communicator fail at once where another rank's has, whose next call would wait for ever."""
        entry, communicator = self._mesh.failed.get(generation), getattr(self, "communicator", None)
        if entry is None or communicator is None or generation != self.generation or self.closed:
            return
        member, message = entry
        kind = CollectiveTimeout if message["is_late"] else CollectiveError
        communicator.fail(kind(f"{communicator!r}: member {member} has given up: {message['text']}"))

    def _announce_failure(self, error: CollectiveError) -> None:
        """Tell the other ranks of a failure that they have not told of themselves."""
        mesh, generation = self._mesh, self.generation
        if isinstance(error, RankLost) or mesh.has_failed or generation in mesh.failed:
            return  # the end of a rank is known to all by its lines
        message = {"kind": "failed", "generation": generation, "text": str(error)[:LONGEST_TEXT]}
        for member in self.members:
            if member != mesh.me:
                mesh.send(member, {**message, "is_late": isinstance(error, CollectiveTimeout)})

    def check(self) -> None:
        """Raise what the present communicator has failed by."""
        self.communicator.check()

    def abort(self, why: str = "it was aborted") -> None:
        """End what is under way, here and on the others, which are told. `rebuild` goes on from here."""
        self.communicator.abort(why)

    def rebuild(self, *, grace: float | None = None) -> Self:
        """Make the next communicator over the ranks that live, which all call this; returns the world itself.

        What is under way is ended first. A rank is waited for `grace` seconds, the deadline where it is not said; one
        that comes later gets RankLeftOut. Memory of this rank is as it was, but for what failed collectives were to
        write. CollectiveError where a rank is lost meanwhile: call it again.
        """
        old = self.communicator
        if (
            self._announce_failure in old.watchers
        ):  # who has not called this as yet may still be within a call that ends well
            old.watchers.remove(self._announce_failure)
        old.fail(CollectiveError(f"{old!r} was given up to rebuild its world"))
        until = self.deadline if grace is None else grace
        if self._regroup is None:
            candidates = [member for member in self.members if member not in self._mesh.left]
            agreed = agree_on_members(self._mesh, candidates, self.generation + 1, until, self._maker.payload)
        else:
            mesh, agreed = self._regroup(self._mesh, self.members, self.generation + 1, until)
            self._attach_mesh(mesh)
        self.generation = agreed.generation  # also where what follows fails: the next count is another one
        old.close()
        clear_failed(self.device, old)
        self._start_generation(agreed)
        return self

    # -- the end ------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Give the communicator back and leave; a second call does nothing."""
        if not self.closed:
            self.closed = True
            self.communicator.close()
            clear_failed(self.device, self.communicator)
            self._mesh.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._mesh.has_failed = True
            self.communicator.fail(CollectiveError(f"rank {self.rank} left its world by {type(error).__name__}"))
        self.close()

    def __repr__(self) -> str:
        return f"<World: rank {self.rank} of {self.size} on {self.device}, generation {self.generation}>"
