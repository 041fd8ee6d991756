"""Every error that `dispatch` raises, under one root.

An error says which operand, what was given, what was expected and what to do. Errors of the libraries themselves
(`cudabind.errors.CudaError`) pass through as the `__cause__`; this module never touches a library.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from dispatch.refusal import Kind, distance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dispatch.refusal import Refusal

__all__ = [
    "ActorLost",
    "BadIndex",
    "BadRequest",
    "BadRequestClass",
    "BadRow",
    "BadType",
    "Closed",
    "CollectiveError",
    "CollectiveTimeout",
    "DeadlineExceeded",
    "DependencyFailed",
    "DeviceFault",
    "DeviceUnavailable",
    "DispatchError",
    "HookFailed",
    "LinAlgError",
    "NoRow",
    "OutOfMemory",
    "OutOfRange",
    "QueueFull",
    "RankLeftOut",
    "RankLost",
    "Refused",
    "StaleTensor",
    "TaintedTensor",
    "Undelivered",
    "WorkerFailed",
]


LISTED = 10  # failures that the message of Undelivered spells out
NEAREST = 8  # rows that the message of NoRow spells out
LINE = 160  # characters of a line of a message that has several
LONG_LINE = 240  # of the one that says what to do
GIVEN = 400  # of what was given
EXPECTED = 600  # of what was expected, and of a hint
ERROR_CHARS = 400  # of another error inside a message


def one_line(text: str, most: int) -> str:
    """A text as one line of so many characters at most; an ellipsis stands for what is left out of its middle."""
    line = text.replace("\n", " ")
    tail = most // 4
    return line if len(line) <= most else f"{line[: most - tail - 1]}…{line[-tail:]}"


def error_text(error: BaseException, say: Callable[[BaseException], str] = repr) -> str:
    """An error in one line, even if its own `__repr__` or `__str__` raises.

    Of a message with several lines it is the first, which says what is wrong.
    """
    try:
        text = say(error)
        if say is repr and "\n" in (message := str(error)):
            text = f"{type(error).__name__}({message.partition(chr(10))[0]!r})"
        return one_line(text.partition("\n")[0], ERROR_CHARS)
    except Exception as worse:  # noqa: BLE001  # of a class of the user's
        return f"a {type(error).__name__} that has no words: {type(worse).__name__}"


class DispatchError(Exception):
    """Root of all errors of `dispatch`."""


class BadRequest(DispatchError, ValueError):
    """A request that no library could carry out: which operand, what was given, what was expected, what to do."""

    def __init__(self, operand: str, given: str, expected: str, hint: str = "") -> None:
        self.operand, self.given = operand, one_line(given, GIVEN)
        self.expected, self.hint = one_line(expected, EXPECTED), one_line(hint, EXPECTED)
        text = f"{operand}: got {self.given}; expected {self.expected}"
        self.args = (f"{text}. Hint: {self.hint}" if hint else text,)  # torch.compile can trace no super().__init__()

    def __reduce__(self) -> tuple[type[BadRequest], tuple[str, ...]]:
        return type(self), (self.operand, self.given, self.expected, self.hint)

    def renamed(self, names: Mapping[str, str]) -> BadRequest:
        """This error with other names of arguments, wherever they stand as words.

        For a function that passes its arguments on to another one: `names` has what the other one calls each of them,
        and what the function itself does.
        """
        word = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        texts = (self.operand, self.given, self.expected, self.hint)
        return type(self)(*(word.sub(lambda found: names[found[0]], text) for text in texts))


class BadIndex(BadRequest, IndexError):
    """An index beyond the end of an axis; iterating over a tensor ends by it."""


class BadType(BadRequest, TypeError):
    """An operand of a kind that is not taken, such as an index array where only integers and slices are."""


class OutOfRange(BadRequest, OverflowError):
    """A number that the dtype asked for cannot hold, where NumPy raises OverflowError as well."""


class NoRow(DispatchError, LookupError):
    """A sound request that no row of the table takes: what was asked, the nearest that works, the nearest rows.

    `tried` holds all rows in the table's order, each with its reasons; the message spells out the nearest of them, and
    one of another machine's only where this machine has none.
    `nearest` names the row that is least far away and what it needs; `change` says which fields to change to what for
    a row to take the request, or is empty where no small change does. `request` is what was asked in full.
    """

    def __init__(
        self,
        request: str,
        tried: Sequence[tuple[str, Sequence[Refusal]]],
        nearest: str,
        change: str = "",
        asked: str = "",
    ) -> None:
        self.request, self.nearest, self.change, self.asked = request, nearest, change, asked or request
        self.tried = tuple((row, tuple(reasons)) for row, reasons in tried)
        nearest_first = self.nearest_first
        here = next((n for n, (_, why) in enumerate(nearest_first) if _is_of_other_arch(why)), len(nearest_first))
        listed = nearest_first[: min(here or NEAREST, NEAREST)]
        lines = [
            one_line(f"no row of the table takes {self.asked}", LINE),
            one_line(f"Nearest that works: {change or nearest}", LONG_LINE),
            *(one_line(f"  {row}: {'; '.join(map(str, why))}", LINE) for row, why in listed),
        ]
        more = len(self.tried) - len(listed)
        further = f"{more} more row{'s' if more > 1 else ''} further away; all: " if more > 0 else "all: "
        lines.append(f"  {further}error.tried, print(dispatch.explain(request))")
        super().__init__("\n".join(lines))

    @property
    def nearest_first(self) -> list[tuple[str, tuple[Refusal, ...]]]:
        """The rows that were tried, with their reasons: those that take the request, which their library refused; then
        the nearest; those of other machines last.
        """

        def far(entry: tuple[str, tuple[Refusal, ...]]) -> tuple[bool, bool, int]:
            kinds = [reason.kind for reason in entry[1]]
            return Kind.ARCH in kinds, Kind.LIBRARY not in kinds, distance(entry[1])

        return sorted(self.tried, key=far)

    def __repr__(self) -> str:
        return f"NoRow({str(self).partition(chr(10))[0]!r})"

    def __reduce__(self) -> tuple[type[NoRow], tuple[object, ...]]:
        return type(self), (self.request, self.tried, self.nearest, self.change, self.asked)


def _is_of_other_arch(reasons: Sequence[Refusal]) -> bool:
    """Whether a row is for another architecture."""
    return any(reason.kind is Kind.ARCH for reason in reasons)


class Refused(DispatchError):
    """The refusal of a request that its row took, by the library; the next row is tried, and NoRow carries the reason.

    Kind.RULE says that it is not the library's own: the plan's maker finds something that the request needs.
    """

    def __init__(self, text: str = "", kind: Kind = Kind.LIBRARY) -> None:
        self.kind = kind
        super().__init__(text)


class BadRow(DispatchError, ValueError):
    """A row that the table cannot hold: a duplicate, one that can never be reached, or one with an unsound column."""


class BadRequestClass(DispatchError, TypeError):
    """A request class that lacks what a request needs; it says what, and what to write."""


class StaleTensor(DispatchError, RuntimeError):
    """A tensor of a closed or replaced device, or one that was freed; its memory is gone and was not touched."""


class TaintedTensor(DispatchError, RuntimeError):
    """A tensor that a failed request may have half written; reading it is refused until it is overwritten."""


class DeviceUnavailable(DispatchError, RuntimeError):
    """The device asked for is not there: no driver, no such GPU, or a library that is missing."""


class DeviceFault(DispatchError, RuntimeError):
    """A kernel faulted; the CUDA context of this process is lost, and every later call on the device says so."""


class OutOfMemory(DispatchError, MemoryError):
    """Device memory did not suffice, also after the device's caches were freed."""


class QueueFull(DispatchError, RuntimeError):
    """A worker's queue is full and is not waited for: a call is refused, or the oldest request is dropped."""


class Closed(DispatchError, RuntimeError):
    """The supervisor or the device was closed before the call."""


class LinAlgError(DispatchError, np.linalg.LinAlgError):
    """A routine of linear algebra that failed on sound arguments; NumPy's error of this name is a base of it.

    `routine` is the function; `statuses` holds the status of each matrix that failed by its place in the batch, () for
    the only one.
    """

    def __init__(self, routine: str, statuses: Mapping[tuple[int, ...], int], meaning: str, hint: str = "") -> None:
        self.routine, self.statuses, self.meaning, self.hint = routine, dict(statuses), meaning, hint
        place, status = next(iter(self.statuses.items()))
        where = f" of matrix {list(place)}" if place else ""
        more = f" ({len(self.statuses)} matrices failed)" if len(self.statuses) > 1 else ""
        text = f"{routine}: {meaning.format(status=status, before=status - 1)}{where}{more}"
        super().__init__(f"{text}. Hint: {hint}" if hint else text)

    def __reduce__(self) -> tuple[type[LinAlgError], tuple[object, ...]]:
        return type(self), (self.routine, self.statuses, self.meaning, self.hint)


class CollectiveError(DispatchError, RuntimeError):
    """A communicator that failed: what its ranks had under way is not done, and it takes no further call.

    What that was to write is neither the old nor the new. `World.rebuild()` makes a communicator over those that live.
    """


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A collective that was not done on all ranks by its deadline: a rank hangs, is stopped, or calls another one."""


class RankLost(CollectiveError):
    """Ranks that have ended, or whose connection broke; `ranks` are their numbers, () where that is not known."""

    def __init__(self, text: str, ranks: Sequence[int] = ()) -> None:
        self.text, self.ranks = text, tuple(ranks)
        super().__init__(text)

    def __reduce__(self) -> tuple[type[RankLost], tuple[object, ...]]:
        return type(self), (self.text, self.ranks)


class RankLeftOut(CollectiveError):
    """This rank was silent for too long: the others have built their world without it, and it can only begin anew."""


class WorkerFailed(DispatchError, RuntimeError):
    """A worker broke through no fault of its requests (a defect), or was restarted too often to go on."""


class ActorLost(WorkerFailed):
    """An actor of Ray that ended, or is being started anew: what it had in flight may have run or not, and is not run
    again."""


class DeadlineExceeded(DispatchError, TimeoutError):
    """A request that had not started when the time it was submitted with was over; it was not run."""


class HookFailed(DispatchError, RuntimeError):
    """A hook around the enqueueing of a request raised; the `__cause__` is what it raised."""


class DependencyFailed(DispatchError, RuntimeError):
    """A request that was not run, because one that it was submitted to run after failed or was cancelled."""


class Undelivered(DispatchError):
    """What failed in a supervisor and nobody asked for: `exceptions` holds it all, in the order in which it failed."""

    def __init__(self, exceptions: Sequence[BaseException], more: int = 0) -> None:
        self.exceptions = tuple(exceptions)
        self.more = more  # failures beyond those that are kept
        lines = [f"{len(self.exceptions) + more} failure(s) that no result() or exception() was asked for"]
        lines += [
            one_line(f"  {type(error).__name__}: {error_text(error, str)}", LINE) for error in self.exceptions[:LISTED]
        ]
        left = len(self.exceptions) + more - LISTED
        super().__init__("\n".join([*lines, f"  and {left} more"] if left > 0 else lines))

    def __reduce__(self) -> tuple[type[Undelivered], tuple[object, ...]]:
        return type(self), (self.exceptions, self.more)
