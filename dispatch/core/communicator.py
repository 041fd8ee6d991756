"""What a collective request is told of its ranks: a communicator, of whichever library carries the data.

Requests hold one, rows ask which library it is of, plans call that. `World` (dispatch/world) makes them and replaces
them; libraries/nccl, libraries/mpi and libraries/threads have them. This module calls no library.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from dispatch.checks import check_number
from dispatch.errors import BadRequest, Closed, CollectiveError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from dispatch.device.device import Device

__all__ = ["DEADLINE", "Communicator", "Ranks", "communicator_of"]

DEADLINE = 300.0  # seconds that a collective may take, unless a communicator is made with another


class Ranks(Protocol):
    """What a request takes for its ranks: a communicator, or a world, of which it is the present one."""

    @property
    def communicator(self) -> Communicator:
        """The communicator that calls are made on."""


class Communicator(ABC):
    """The ranks that take part in a collective, and this one's place among them.

    Guarantees: once it has failed or is closed, every call raises, on each thread, and nothing waits on it any more.
    Calls of one communicator are made in the same order on all its ranks; which thread makes them is all the same.

    Attributes:
        rank, size: this rank, and how many there are.
        device: whose memory it moves.
        generation: which of its world's communicators it is, from 0.
        deadline: seconds that a collective may take.
        error: what it failed by, None while it works.
    """

    library: ClassVar[str]  # by which plans know it
    is_constant: ClassVar[bool] = True  # to what is remembered of calls: another one is another call

    def __init__(
        self, rank: int, size: int, device: Device, *, generation: int = 0, deadline: float = DEADLINE
    ) -> None:
        check_number("deadline", deadline, low=1e-3, high=1e9)
        self.rank, self.size, self.device = rank, size, device
        self.generation, self.deadline = generation, float(deadline)
        self.error: CollectiveError | None = None
        self.closed = False
        self.watchers: list[Callable[[CollectiveError], None]] = []  # told once, by whichever thread finds it failed
        self.endings: list[Callable[[], object]] = []  # called once, as it is closed
        self._failing = threading.Lock()

    @property
    def communicator(self) -> Communicator:
        """Itself: a request takes it for its ranks, as it does a world."""
        return self

    def check(self) -> None:
        """Raise what it failed by, Closed where it was closed."""
        if self.error is not None:
            raise self.failure()
        if self.closed:
            raise Closed(f"{self!r} was closed")

    def failure(self) -> CollectiveError:
        """What it failed by as an error of its own, so that each thread has its own traceback."""
        error = self.error or CollectiveError(f"{self!r} failed")
        made: tuple[Any, ...] = tuple(error.__reduce__())
        copy: CollectiveError = made[0](*made[1])
        copy.__cause__ = error.__cause__
        return copy

    def fail(self, error: CollectiveError) -> None:
        """Take no further call, and end what is under way; only the first error counts."""
        with self._failing:
            if self.error is not None or self.closed:
                return
            self.error = error
        self.stop()
        for watcher in list(self.watchers):
            watcher(error)

    def raise_failed(self, error: CollectiveError) -> NoReturn:
        """`fail`, and raise what it failed by, which may be an earlier error."""
        self.fail(error)
        raise self.failure()

    def abort(self, why: str = "it was aborted") -> None:
        """End what is under way on this rank; every later call raises CollectiveError."""
        self.fail(CollectiveError(f"{self!r}: {why}"))

    @abstractmethod
    def stop(self) -> None:
        """Have the library end what is under way; called once, from any thread."""

    @abstractmethod
    def release(self) -> None:
        """Give back what the library holds, where it has not failed."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """The communicator of those ranks that give the same color, in the order of (key, rank); None for color None.

        Called by all ranks.
        """

    def close(self) -> None:
        """Give back what the library holds; a second call does nothing."""
        with self._failing:
            if self.closed:
                return
            self.closed, failed = True, self.error is not None
        try:
            if not failed:
                self.release()
        finally:
            while self.endings:
                self.endings.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(CollectiveError(f"{self!r} was left by {type(error).__name__}"))
        self.close()

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is of this process alone: each rank makes its own")

    def __repr__(self) -> str:
        of = f"rank {self.rank} of {self.size} on {self.device}"
        return f"<{type(self).__name__}: {of}, generation {self.generation}>"


def communicator_of(given: Any) -> Communicator:
    """The communicator that a request was given, or a world's present one; BadRequest for anything else."""
    found = getattr(given, "communicator", None)
    if not isinstance(found, Communicator):
        hint = "dispatch.World.from_env(), .from_mpi(comm) and .local(devices) make worlds"
        raise BadRequest("comm", f"a {type(given).__name__}", "a World, or one of its communicators", hint)
    return found
