"""Every error that `dispatch` raises, under one root.

An error names the operand, the given value, the expected value and the remedy. Errors of the libraries themselves
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


LISTED = 10  # failures in the message of Undelivered
NEAREST = 8  # rows in the message of NoRow
LINE = 160  # characters of a line in a message of several lines
LONG_LINE = 240  # characters of the line that says what to do
GIVEN = 400  # characters of the given value
EXPECTED = 600  # characters of the expected value, and of a hint
ERROR_CHARS = 400  # characters of another error inside a message


def one_line(text: str, most: int) -> str:
    """A text as one line of at most `most` characters; an ellipsis replaces the middle of a longer text."""
    line = text.replace("\n", " ")
    tail = most // 4
    return line if len(line) <= most else f"{line[: most - tail - 1]}…{line[-tail:]}"


def error_text(error: BaseException, say: Callable[[BaseException], str] = repr) -> str:
    """An error in one line, even if its own `__repr__` or `__str__` raises.

    Only the first line of a message is used, because it says what is wrong.
    """
    try:
        text = say(error)
        if say is repr and "\n" in (message := str(error)):
            text = f"{type(error).__name__}({message.partition(chr(10))[0]!r})"
        return one_line(text.partition("\n")[0], ERROR_CHARS)
    except Exception as worse:  # noqa: BLE001  # a user's class may raise anything
        return f"a {type(error).__name__} that cannot be printed: {type(worse).__name__}"


def type_shown(value: object) -> str:
    """The type of a value with an article, for a message: "a list", "an int"; "None" for None."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


class DispatchError(Exception):
    """Root of all errors of `dispatch`."""


class BadRequest(DispatchError, ValueError):
    """A request that no library could run: which operand, the given value, the expected value, what to do."""

    def __init__(self, operand: str, given: str, expected: str, hint: str = "") -> None:
        self.operand, self.given = operand, one_line(given, GIVEN)
        self.expected, self.hint = one_line(expected, EXPECTED), one_line(hint, EXPECTED)
        text = f"{operand}: got {self.given}; expected {self.expected}"
        self.args = (f"{text}. Hint: {self.hint}" if hint else text,)  # torch.compile can trace no super().__init__()

    def __reduce__(self) -> tuple[type[BadRequest], tuple[str, ...]]:
        return type(self), (self.operand, self.given, self.expected, self.hint)

    def about(self, operand: str) -> BadRequest:
        """This error under another name of the operand; the rest of its text is the same."""
        return type(self)(operand, self.given, self.expected, self.hint)

    def renamed(self, names: Mapping[str, str]) -> BadRequest:
        """This error with other names of arguments, wherever they occur as whole words.

        For a function that passes its arguments on to another one: `names` maps the other function's name of each
        argument to the function's own name.
        """
        word = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        texts = (self.operand, self.given, self.expected, self.hint)
        return type(self)(*(word.sub(lambda found: names[found[0]], text) for text in texts))


class BadIndex(BadRequest, IndexError):
    """An index beyond the end of an axis; iteration over a tensor ends with this error."""


class BadType(BadRequest, TypeError):
    """An operand of an unsupported type, such as an index array where only integers and slices are supported."""


class OutOfRange(BadRequest, OverflowError):
    """A number that the requested dtype cannot represent; NumPy raises OverflowError for it as well."""


class NoRow(DispatchError, LookupError):
    """A valid request that no row of the table takes: the request, the nearest one that works, the nearest rows.

    `tried` holds all rows in the table's order, each with its reasons. The message lists the nearest of them; it lists
    rows of other architectures only if there are none of this one.
    `nearest` names the nearest row and what it needs. `change` says which fields to change, and to which values, so
    that a row takes the request; it is empty if no small change helps. `request` is the full request as text.
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
        count = next((n for n, (_, why) in enumerate(nearest_first) if _is_of_other_arch(why)), len(nearest_first))
        listed = nearest_first[: min(count or NEAREST, NEAREST)]
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
        """The rows that were tried, with their reasons: first those that take the request but whose library refused it,
        then the nearest; rows of other architectures come last.
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
    """The library refuses a request that its row takes; the next row is tried, and NoRow has the reason.

    Kind.RULE means that the library has not refused it: the code that makes the plan has found an unmet requirement.
    """

    def __init__(self, text: str = "", kind: Kind = Kind.LIBRARY) -> None:
        self.kind = kind
        super().__init__(text)


class BadRow(DispatchError, ValueError):
    """A row that the table cannot hold: a duplicate, one that can never be reached, or one with an invalid column."""


class BadRequestClass(DispatchError, TypeError):
    """A request class that lacks something that requests need; the message says what, and what to write."""


class StaleTensor(DispatchError, RuntimeError):
    """A tensor of a closed or replaced device, or one that was freed; its memory is freed and was not accessed."""


class TaintedTensor(DispatchError, RuntimeError):
    """A tensor that a failed request may have half written; reading it is refused until it is overwritten."""


class DeviceUnavailable(DispatchError, RuntimeError):
    """The requested device is not available: there is no driver, no such GPU, or a library is missing."""


class DeviceFault(DispatchError, RuntimeError):
    """A kernel faulted; the CUDA context of this process is lost, and every later call on the device says so."""


class OutOfMemory(DispatchError, MemoryError):
    """There was not enough device memory, even after the device's caches were freed."""


class QueueFull(DispatchError, RuntimeError):
    """A worker's queue is full and the call does not wait: it is refused, or the oldest request is dropped."""


class Closed(DispatchError, RuntimeError):
    """The supervisor or the device was closed before the call."""


class LinAlgError(DispatchError, np.linalg.LinAlgError):
    """A routine of linear algebra failed on valid arguments; NumPy's error of this name is a base class.

    `routine` is the function; `statuses` maps the index of each failed matrix in the batch to its status. The index is
    () if there is no batch.
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
    """A communicator failed: its calls under way have not completed, and it accepts no further call.

    The outputs of those calls are undefined. `World.rebuild()` makes a communicator of the surviving ranks.
    """

    has_closed = False  # whether ranks have only closed their worlds, and no process has ended or hangs


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A collective did not complete on all ranks by its deadline: a rank hangs, is stopped, or calls another one."""


class RankLost(CollectiveError):
    """Ranks have ended, or their connection broke; `ranks` are their numbers, () if they are not known.

    `has_closed`: whether they have only closed their worlds, and their processes go on.
    """

    def __init__(self, text: str, ranks: Sequence[int] = (), has_closed: bool = False) -> None:
        self.text, self.ranks, self.has_closed = text, tuple(ranks), has_closed
        super().__init__(text)

    def __reduce__(self) -> tuple[type[RankLost], tuple[object, ...]]:
        return type(self), (self.text, self.ranks, self.has_closed)


class RankLeftOut(CollectiveError):
    """This rank was silent for too long: the others have rebuilt the world without it, so it can only start again."""


class WorkerFailed(DispatchError, RuntimeError):
    """A worker failed because of a defect, not because of its requests, or it was restarted too often."""


class ActorLost(WorkerFailed):
    """A Ray actor has ended or is being restarted: its requests in flight may have run or not, and are not run
    again."""


class DeadlineExceeded(DispatchError, TimeoutError):
    """A request that had not started by its deadline; it was not run."""


class HookFailed(DispatchError, RuntimeError):
    """A hook around the enqueueing of a request raised; the `__cause__` is what it raised."""


class DependencyFailed(DispatchError, RuntimeError):
    """A request that was not run, because a request that it depends on failed or was cancelled."""


class Undelivered(DispatchError):
    """Failures in a supervisor that no caller retrieved; `exceptions` holds them, the earliest first."""

    def __init__(self, exceptions: Sequence[BaseException], more: int = 0) -> None:
        self.exceptions = tuple(exceptions)
        self.more = more  # the number of failures that are not in `exceptions`
        lines = [f"{len(self.exceptions) + more} failure(s) that no result() or exception() call has retrieved"]
        lines += [
            one_line(f"  {type(error).__name__}: {error_text(error, str)}", LINE) for error in self.exceptions[:LISTED]
        ]
        unlisted = len(self.exceptions) + more - LISTED
        super().__init__("\n".join([*lines, f"  and {unlisted} more"] if unlisted > 0 else lines))

    def __reduce__(self) -> tuple[type[Undelivered], tuple[object, ...]]:
        return type(self), (self.exceptions, self.more)
