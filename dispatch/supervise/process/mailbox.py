"""Mailbox: words of memory that parent and child share, by which a lone request and its end are known without a call.

To send a message takes a process 1.5 us and more, to look whether one has come 1 us; a word is read in 40 ns. But who
sleeps hears of no word. So a request that is put here goes over the connection, too, and an end does unless the parent
has said, here, that it has found it. A word that nobody sees costs time and nothing else.

Guarantees: a word is 8 bytes that are written in one step. Of two that one process writes, the other sees the second
no sooner than the first, and what it wrote elsewhere before no later: that is so on x86, elsewhere there is no mailbox.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from dispatch.supervise.process.chunks import FileMapping

__all__ = ["Mailbox", "mailbox_file", "mailboxes"]

IS_ORDERED = os.uname().machine == "x86_64"
# The places of the words: what the parent writes in one cache line, what the child writes in another.
ASKED, HEARD, ENDED = 0, 1, 8
WORDS = 16  # of one connection
NAME_BITS, NUMBER_BITS = 24, 40  # of a request in a word: those with larger ones go over the connection alone
# Looks at a word, for `map`: before another look at the connection, which takes as long as these.
REQUESTS, ENDS = (ASKED,) * 32, (ENDED,) * 32
LIKELY = 1  # in the place of a request that the parent waits for: it is likely to wait here for the next


class Mailbox:
    """The words of one connection.

    Guarantees: the parent asks only where it has heard the end of all that it sent before, so the child may begin at
    once. It says that it has found an end only once that is settled.
    """

    __slots__ = ("_mapping", "asked", "found_last", "latest", "taken", "words")

    def __init__(self, mapping: FileMapping, index: int) -> None:
        size = ctypes.sizeof(ctypes.c_uint64) * WORDS
        words = (ctypes.c_uint64 * WORDS).from_address(mapping.base + index * size)
        self._mapping = mapping  # which must live as long
        self.words = memoryview(words).cast("B").cast("Q")
        self.asked = 0  # in the parent: the latest request that was put here
        self.found_last = False  # and whether the end of the one before was found here
        self.taken = self.latest = 0  # in the child: the latest request that has come here first, and at all

    # -- the parent -----------------------------------------------------------------------------------------------
    def ask(self, number: int, name: int) -> None:
        """Put a request here that the child knows; nothing else may be in flight."""
        if not (number >> NUMBER_BITS or name >> NAME_BITS):
            self.asked = number
            self.words[ASKED] = number << NAME_BITS | name

    def wait_for(self, number: int) -> None:
        """Say that the end of a request is looked for here."""
        self.words[HEARD] = number << 1

    def is_ended(self, number: int) -> bool:
        """Whether a request has ended well, at one of several looks."""
        return number in map(self.words.__getitem__, ENDS)

    def found(self, number: int) -> None:
        """Say that an end is settled."""
        self.found_last = True
        self.words[HEARD] = number << 1 | 1

    def not_found(self, *, likely: bool) -> None:
        """Note that an end came over the connection, or is to; `likely`: but the next may well be looked for here."""
        self.asked = 0
        self.found_last = False
        self.words[HEARD] = LIKELY if likely else 0

    # -- the child ------------------------------------------------------------------------------------------------
    def request(self) -> tuple[int, int] | None:
        """The number and name of a request that has come here first, at one of several looks."""
        least = self.latest + 1 << NAME_BITS
        for word in filter(least.__le__, map(self.words.__getitem__, REQUESTS)):
            self.taken = self.latest = word >> NAME_BITS
            return self.taken, word & (1 << NAME_BITS) - 1
        return None

    def end(self, number: Any) -> bool:
        """Say that a request has ended well, if it was put here and this is likely to be found; else it is no such
        number."""
        words = self.words
        if not words[HEARD] or words[ASKED] >> NAME_BITS != number:
            return False
        words[ENDED] = number
        return True

    def is_waited_for(self, number: int) -> bool:
        """Whether the parent looks here for the end of that request now."""
        return self.words[HEARD] == number << 1

    def is_heard(self, number: int) -> bool:
        """Whether the parent has settled the end of that request."""
        return self.words[HEARD] == number << 1 | 1


def mailbox_file(count: int) -> int:
    """The descriptor of a file with words for so many connections; -1 where this processor cannot have them."""
    if not IS_ORDERED:
        return -1
    fd = os.memfd_create("mailboxes", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, _bytes(count))
    except BaseException:
        os.close(fd)
        raise
    return fd


def mailboxes(fd: int, count: int) -> list[Mailbox | None]:
    """Those of a file of `mailbox_file`, which may be closed then."""
    if fd < 0:
        return [None] * count
    mapping = FileMapping(_bytes(count), fd)
    return [Mailbox(mapping, index) for index in range(count)]


def _bytes(count: int) -> int:
    return count * WORDS * ctypes.sizeof(ctypes.c_uint64)
