"""Communicator: the ranks of a collective, whichever library moves the data.

Requests hold one, rows match on its library, and plans call that library. `World` (dispatch/world) makes and replaces
communicators; libraries/nccl, mpi, gloo and threads implement them. This module calls no library.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

from dispatch.checks import check_int, check_number, shown
from dispatch.errors import BadRequest, Closed, CollectiveError, RankLost

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from dispatch.device.device import Device

__all__ = ["DEADLINE", "Communicator", "Ranks", "check_split", "communicator_of"]

LARGEST = (1 << 31) - 1  # a C int
DEADLINE = 300.0  # seconds that a collective may take by default


class Ranks(Protocol):
    """The type of `comm` in requests: a communicator, or a world, which stands for its current communicator."""

    @property
    def communicator(self) -> Communicator:
        """The communicator that calls are made on."""


class Communicator(ABC):
    """The ranks that take part in a collective, and this one's rank.

    Guarantees: once it has failed or is closed, every call raises, on each thread, and no call waits for it any more.
    Calls of one communicator must be made in the same order on all its ranks; any thread may make them.

    Attributes:
        rank, size: this rank, and how many there are.
        device: the device whose memory it moves.
        generation: its number among the communicators of its world, from 0.
        deadline: seconds that a collective may take.
        error: the error that it failed with, None while it works.
        calls: how many calls of all ranks this one has begun, if `counts_calls`.
    """

    library: ClassVar[str]  # the name that rows and plans match
    is_constant: ClassVar[bool] = True  # remembered calls compare it by identity (core/call_cache.py)
    counts_calls: ClassVar[bool] = False  # whether its calls use `count_call`

    def __init__(
        self, rank: int, size: int, device: Device, *, generation: int = 0, deadline: float = DEADLINE
    ) -> None:
        check_number("deadline", deadline, low=1e-3, high=1e9)
        self.rank, self.size, self.device = rank, size, device
        self.generation, self.deadline = generation, float(deadline)
        self.error: CollectiveError | None = None
        self.closed = False
        self.calls = 0
        self._left: dict[int, int] = {}  # the ranks that have closed theirs, and how many calls they had begun
        self.watchers: list[Callable[[CollectiveError], None]] = []  # called once, by the thread that fails it
        self.endings: list[Callable[[], object]] = []  # called once, when it is closed
        self._failing = threading.Lock()

    @property
    def communicator(self) -> Communicator:
        """This communicator; requests call this method, which a world has, too."""
        return self

    def check(self) -> None:
        """Raise the error that it failed with, or Closed if it was closed."""
        if self.error is not None:
            raise self.failure()
        if self.closed:
            raise Closed(f"{self!r} was closed")

    def failure(self) -> CollectiveError:
        """A copy of the error that it failed with, so that each thread has its own traceback."""
        error = self.error or CollectiveError(f"{self!r} failed")
        reduced: tuple[Any, ...] = tuple(error.__reduce__())
        copy: CollectiveError = reduced[0](*reduced[1])
        copy.__cause__ = error.__cause__
        return copy

    def fail(self, error: CollectiveError) -> None:
        """Refuse further calls and end those under way; only the first error is kept."""
        with self._failing:
            if self.error is not None or self.closed:
                return
            self.error = error
        self.stop()
        for watcher in list(self.watchers):
            watcher(error)

    def count_call(self) -> None:
        """Count a call that all ranks make; RankLost if one of them has left before it."""
        self.calls += 1
        if self._left:
            self._fail_without_left_ranks()
        self.check()

    def on_rank_left(self, rank: int, calls: int) -> None:
        """A rank has closed its communicator after so many calls: fail if this one has begun more, or once it does."""
        self._left[rank] = calls
        self._fail_without_left_ranks()

    def _fail_without_left_ranks(self) -> None:
        missing = tuple(rank for rank, calls in sorted(self._left.copy().items()) if calls < self.calls)
        if missing:
            who = ", ".join(map(str, missing))
            text = f"rank {who} has closed its world, or ends, and does not make this call, number {self.calls}"
            self.fail(RankLost(f"{self!r}: {text}", missing, has_closed=True))

    def raise_failed(self, error: CollectiveError) -> NoReturn:
        """Call `fail` and raise the error; if it had failed before, the earlier one."""
        self.fail(error)
        raise self.failure()

    def abort(self, why: str = "it was aborted") -> None:
        """End the calls under way on this rank; every later call raises CollectiveError."""
        self.fail(CollectiveError(f"{self!r}: {why}"))

    @abstractmethod
    def stop(self) -> None:
        """Make the library end the calls under way; called once, from any thread."""

    @abstractmethod
    def release(self) -> None:
        """Free what the library holds; not called after a failure."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """The communicator of the ranks that pass the same color, ordered by (key, rank); None for color None.

        Called by all ranks.
        """

    def close(self) -> None:
        """Free what the library holds; a second call does nothing."""
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
            self.fail(CollectiveError(f"the block of {self!r} ended with {type(error).__name__}"))
        self.close()

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} belongs to this process and cannot be pickled: each rank creates its own"
        )

    def __repr__(self) -> str:
        of = f"rank {self.rank} of {self.size} on {self.device}"
        return f"<{type(self).__name__}: {of}, generation {self.generation}>"


def check_split(color: Any, key: Any) -> tuple[int | None, int]:
    """The arguments of `split` as Python's ints; BadRequest for what a C int, as NCCL takes it, cannot hold."""
    try:
        number = None if color is None else check_int("color", color, 0, LARGEST)
    except BadRequest as error:
        expected = f"a whole number from 0 to {LARGEST}, or None for a rank that takes no part"
        raise BadRequest("color", shown(color), expected) from error
    return number, check_int("key", key, -LARGEST, LARGEST)


def communicator_of(given: Any) -> Communicator:
    """The given communicator, or the current one of a given world; BadRequest for anything else."""
    current = getattr(given, "communicator", None)
    if not isinstance(current, Communicator):
        hint = "dispatch.World.from_env(), .from_mpi(comm) and .local(devices) make worlds"
        raise BadRequest("comm", f"a {type(given).__name__}", "a World, or one of its communicators", hint)
    return current
