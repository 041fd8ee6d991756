"""Calls that are numbered, for an op whose every call goes on where the one before it has ended.

A generator's place in its sequence is such a thing. A library that keeps it would not know of calls that are launched
without it; so the plan keeps none, and each call is given its number, as another argument behind its addresses.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from typing import Any

from dispatch.checks import names_arguments

__all__ = ["CallCounter", "CallNumber", "as_trial"]


class CallNumber(int):
    """The number of a call, by which it is told from an address."""

    __slots__ = ()


@names_arguments
class CallCounter:
    """Numbers the calls of the plans that are made with it: 0, 1, 2, …, in whatever way each is carried out.

    A plan declares it, `Plan(row, capture_safe=True, counter=counter)`, and its `enqueue` is given the number of the
    call as the last of its arguments. What a call takes from those before it must follow from the number alone, for a
    launch of the recorded call is nothing that the library hears of: `enqueue` sets a generator's offset to so many
    times what one call takes, before it calls the library. Once the words that grow by a fixed step with each number
    are known, the call is launched with those of its own. A plan whose words grow by themselves keeps its library's.

    Guarantees: each number is given to one call, from whatever threads; what is only recorded or timed, to be learnt or
    compared, takes none. A call that raises may have used its number up. Calls within a stream capture of the caller's
    take theirs once: each launch of his graph repeats it. Child processes count for themselves.
    """

    __slots__ = ("_given_back", "_numbers")

    def __init__(self, first: int = 0) -> None:
        self.reset(first)

    def reset(self, first: int = 0) -> None:
        """Begin anew, while no call is being made."""
        self._numbers, self._given_back = count(first), deque[CallNumber]()

    def take(self) -> CallNumber:
        """The number of a call that begins now."""
        try:
            return self._given_back.popleft()  # either is one step of the interpreter
        except IndexError:
            return CallNumber(next(self._numbers))

    def give_back(self, number: CallNumber) -> None:
        """Have the next call take a number with which nothing was enqueued."""
        self._given_back.append(number)


def as_trial(plan: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call that is only recorded or timed: with a number, where the plan's calls have one."""
    return arguments if plan.counter is None else (*arguments, CallNumber(1))
