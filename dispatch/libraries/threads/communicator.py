"""Communicators whose ranks are threads of one process: each rank contributes a value, and all ranks get all values.

The n-th collective of every rank is one round of their rendezvous. No rank waits longer than the communicator's
deadline, and the error says which ranks are missing. If ranks make different calls in a round, all of them get an
error; if one has closed its communicator, the others do not wait for it. This module does not depend on any op.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any, NamedTuple

from dispatch.core.communicator import DEADLINE, Communicator, check_split
from dispatch.device.registry import device as host
from dispatch.errors import BadRequest, Closed, CollectiveError, CollectiveTimeout, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from dispatch.device.device import Device

__all__ = ["Rendezvous", "ThreadCommunicator", "placeholder_communicator", "solo"]

MAX_PLACEHOLDER = 1 << 20  # ranks


class Contribution(NamedTuple):
    """A rank's contribution to a round: a description of its call, the same on all ranks, and its part."""

    call: str
    part: Any


class Rendezvous:
    """The state through which the threads of one communicator exchange values; all its ranks share one object."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, Contribution]] = defaultdict(dict)
        self.collected: dict[int, int] = defaultdict(int)  # by round: how many ranks have collected it
        self.messages: dict[tuple[int, int], deque[Contribution]] = defaultdict(deque)  # by (from, to)
        self.error: CollectiveError | None = None
        self.calls_begun = [0] * size  # how many collectives each rank has begun
        self.left: set[int] = set()  # the ranks that have closed their communicators
        self.process = os.getpid()  # in a forked child the threads of the ranks do not exist

    def leave(self, rank: int) -> None:
        """Set that a rank makes no more calls, and wake the ranks that wait for one."""
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def fail(self, error: CollectiveError) -> None:
        """Set the error, and wake all waiting ranks, which raise it."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def contribute(self, number: int, rank: int, contribution: Contribution) -> None:
        """Add a rank's contribution to a round, without waiting."""
        with self.changed:
            self.rounds[number][rank] = contribution
            self.calls_begun[rank] = number + 1
            if len(self.rounds[number]) == self.size:
                self.changed.notify_all()

    def collect(self, number: int, until: float) -> list[Contribution] | None:
        """The contributions of all ranks, in rank order; None if some are missing when the time is over.

        Also None, at once, if a missing rank has left.
        """

        def is_over() -> bool:
            if self.error is not None or len(self.rounds[number]) == self.size:
                return True
            return not self.left.isdisjoint(self.missing_ranks(number))

        with self.changed:
            self.changed.wait_for(is_over, _seconds_left(until))
            contributions = self.rounds[number]
            if len(contributions) < self.size:
                return None
            self.collected[number] += 1
            if self.collected[number] == self.size:  # all ranks have collected it
                del self.rounds[number], self.collected[number]
            return [contributions[rank] for rank in range(self.size)]

    def missing_ranks(self, number: int) -> list[int]:
        """The ranks that have not contributed to a round."""
        return [rank for rank in range(self.size) if rank not in self.rounds.get(number, {})]

    def send(self, source: int, target: int, contribution: Contribution) -> None:
        """Add a message for one rank, without waiting."""
        with self.changed:
            self.messages[source, target].append(contribution)
            self.changed.notify_all()

    def receive(self, source: int, target: int, until: float) -> Contribution | None:
        """The next message from a rank; None if none comes in time, or that rank has left."""
        box = self.messages[source, target]
        with self.changed:
            self.changed.wait_for(lambda: self.error or box or source in self.left, _seconds_left(until))
            return box.popleft() if box else None


def _seconds_left(until: float) -> float:
    return min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)


class ThreadCommunicator(Communicator):
    """A communicator of one thread of this process, on the host."""

    library = "threads"

    def __init__(
        self, rendezvous: Rendezvous, rank: int, device: Device, *, generation: int = 0, deadline: float = DEADLINE
    ) -> None:
        super().__init__(rank, rendezvous.size, device, generation=generation, deadline=deadline)
        self.rendezvous, self._number = rendezvous, 0

    def check(self) -> None:
        if self.rendezvous.process != os.getpid():
            raise Closed(
                f"{self!r} was created before os.fork(), and the threads of its ranks do not exist in the child; create"
                " a world in the child"
            )
        if self.error is None and self.rendezvous.error is not None:  # another rank has set it
            self.fail(self.rendezvous.error)
        super().check()

    def fail(self, error: CollectiveError) -> None:
        """Fail with the rendezvous' error if that came first, because the end of a rank often follows from it."""
        super().fail(self.rendezvous.error or error)

    def exchange(self, call: str, part: Any) -> Callable[[], list[Any]]:
        """Contribute a part to the next round; the returned function waits for all parts and returns them by rank.

        Parts must not be changed. Raises CollectiveTimeout, RankLost, or CollectiveError if the ranks' calls differ.
        """
        self.check()
        number, self._number = self._number, self._number + 1
        until = time.monotonic() + self.deadline
        self.rendezvous.contribute(number, self.rank, Contribution(call, part))

        def finish() -> list[Any]:
            contributions = self.rendezvous.collect(number, until)
            if contributions is None:
                raise self._fail_missing(call, self.rendezvous.missing_ranks(number))
            for rank, contribution in enumerate(contributions):
                if contribution.call != call:
                    difference = f"rank {self.rank} calls {call}, rank {rank} {contribution.call}"
                    self.raise_failed(CollectiveError(f"{self!r}: ranks disagree: {difference}"))
            return [contribution.part for contribution in contributions]

        return finish

    def send(self, peer: int, call: str, part: Any) -> None:
        """Send a part to another rank, which calls `receive`; does not wait."""
        self.check()
        self.rendezvous.send(self.rank, peer, Contribution(call, part))

    def receive(self, peer: int, call: str) -> Callable[[], Any]:
        """Receive the part of a rank's next `send` to this one; the returned function waits for it."""
        self.check()
        until = time.monotonic() + self.deadline

        def finish() -> Any:
            contribution = self.rendezvous.receive(peer, self.rank, until)
            if contribution is None:
                raise self._fail_missing(f"receive from rank {peer}", [peer])
            if contribution.call != call:
                difference = f"rank {self.rank} expects {call}, rank {peer} sent {contribution.call}"
                self.raise_failed(CollectiveError(f"{self!r}: ranks disagree: {difference}"))
            return contribution.part

        return finish

    def _fail_missing(self, call: str, missing: list[int]) -> CollectiveError:
        """Fail a call in which ranks are missing; returns the error."""
        error = self.rendezvous.error
        if error is None:
            gone = sorted(self.rendezvous.left.intersection(missing))
            who = ", ".join(map(str, gone or missing))
            if gone:
                error = RankLost(f"{self!r}: {call}: rank {who} has closed its communicator and not called it", gone)
            else:
                error = CollectiveTimeout(
                    f"{self!r}: {call} did not complete within {self.deadline:g} s: rank {who} has not called it"
                )
        self.fail(error)
        return self.failure()

    def stop(self) -> None:
        if self.rendezvous.process == os.getpid():  # else a thread that does not exist here may hold its lock
            self.rendezvous.fail(self.failure())

    def release(self) -> None:
        if self.rendezvous.process == os.getpid():
            self.rendezvous.leave(self.rank)

    def split(self, color: int | None, key: int = 0) -> Self | None:
        color, key = check_split(color, key)
        entries = self.exchange("split", (color, key))()
        by_color = self.exchange(
            "split, second part", {} if self.rank else {c: _split_rendezvous(entries, c) for c, _ in entries}
        )()[0]
        if color is None:
            return None
        order = sorted(rank for rank in range(self.size) if entries[rank][0] == color)
        order.sort(key=lambda rank: entries[rank][1])
        new_rank = order.index(self.rank)
        return type(self)(by_color[color], new_rank, self.device, generation=self.generation, deadline=self.deadline)


def _split_rendezvous(given: list[tuple[int | None, int]], color: int | None) -> Rendezvous:
    return Rendezvous(sum(one == color for one, _ in given))


def placeholder_communicator(size: int) -> ThreadCommunicator:
    """Rank 0 of `size` ranks on the host, without the others: for requests that are explained and not run."""
    if not 1 <= size <= MAX_PLACEHOLDER:
        raise ValueError(size)
    return ThreadCommunicator(Rendezvous(size), 0, host("host"))


def solo(device: Device) -> ThreadCommunicator:
    """A communicator of one rank on the host."""
    if not device.is_host:
        raise BadRequest("device", str(device), "the host")
    return ThreadCommunicator(Rendezvous(1), 0, device)
