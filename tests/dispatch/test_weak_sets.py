"""Looking through a weak set to which others are added meanwhile."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import pytest

from dispatch.device.disposal import members

if TYPE_CHECKING:
    from collections.abc import Iterator


class One:
    """What a weak set can hold."""


class Growing(weakref.WeakSet[One]):
    """A weak set to which one more is added amid a look, as by another thread, as long as there are some `to_come`."""

    to_come: list[One]

    def __iter__(self) -> Iterator[One]:
        for one in super().__iter__():
            if self.to_come:
                self.add(self.to_come.pop())
            yield one


def growing(inside: list[One], to_come: list[One]) -> Growing:
    """One with some inside and some to come."""
    made = Growing()
    made.to_come = to_come
    for one in inside:
        made.add(one)
    return made


def test_members_while_some_are_added() -> None:
    """A plain look raises; this one gives all that were there, and those that came."""
    inside, to_come = [One(), One(), One()], [One(), One()]
    everyone = {*inside, *to_come}
    with pytest.raises(RuntimeError, match="changed size"):
        list(growing(inside, to_come.copy()))
    assert set(members(growing(inside, to_come))) == everyone


def test_members_are_those_that_live() -> None:
    """One that is gone is not among them."""
    first, second = One(), One()
    looked_at = weakref.WeakSet((first, second))
    del second
    assert members(looked_at) == [first]
