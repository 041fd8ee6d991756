"""Numbered calls, for ops in which every call continues where the last one ended, as in a random generator.

A library that tracks the position itself would miss the calls that are launched as recorded graphs. So neither the
library nor the plan tracks it: each call gets its number as an argument after the addresses.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

from dispatch.checks import names_arguments

__all__ = ["CallCounter", "CallNumber", "as_trial"]


class CallNumber(int):
    """The number of a call; a separate type, so that it is not confused with an address."""

    __slots__ = ()


@names_arguments
class CallCounter:
    """Numbers the calls of the plans that are made with it: 0, 1, 2, …, however each call is launched.

    A plan declares it, `Plan(row, capture_safe=True, counter=counter)`, and its `enqueue` gets the number of the call
    as its last argument. The position of a call must depend on that number alone, because the library does not see
    launches of a recorded graph: before `enqueue` calls the library, it sets the generator's offset to the number times
    the amount that one call consumes. Once the executor knows which words of the recorded call grow by a fixed step
    with the number, it launches the graph with the words of each call. A plan that counts by itself always uses the
    library's calls.

    Guarantees: each number goes to one call, whichever threads call; calls that only record, time or compare take no
    number. A call that raises may have used its number. A call inside the caller's stream capture takes its number
    once, and every launch of that graph repeats it. Each child process counts separately.
    """

    __slots__ = ("_given_back", "_numbers")

    def __init__(self, first: int = 0) -> None:
        self.reset(first)

    def reset(self, first: int = 0) -> None:
        """Restart the count at `first`; no call may be under way."""
        self._numbers, self._given_back = count(first), deque[CallNumber]()

    def take(self) -> CallNumber:
        """The number for a call that begins now."""
        try:
            return self._given_back.popleft()  # atomic, as `next` below is
        except IndexError:
            return CallNumber(next(self._numbers))

    def give_back(self, number: CallNumber) -> None:
        """Return a number that was not used to enqueue anything; the next call takes it."""
        self._given_back.append(number)


def as_trial(plan: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call that is only recorded or timed, with a number if the plan has a counter."""
    return arguments if plan.counter is None else (*arguments, CallNumber(1))
