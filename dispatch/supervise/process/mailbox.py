"""Mailbox: words of shared memory by which parent and child announce a lone request and its end without a system call.

Sending a message takes 1.5 us or more, polling for one 1 us; reading a word takes 40 ns. But a sleeping process does
not notice a change of a word. So a request announced here is also sent over the connection, and so is its end, unless
the parent has confirmed here that it has seen the end. A word that is not seen in time only costs time.

Guarantees: a word has 8 bytes, which are written atomically. The other process sees two words in the order in which
they were written, and everything that was written before them. This holds on x86; elsewhere there is no mailbox.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from dispatch.supervise.process.chunks import FileMapping

__all__ = ["Mailbox", "mailbox_file", "mailboxes"]

IS_ORDERED = os.uname().machine == "x86_64"
# The indices of the words: the parent's in one cache line, the child's in another.
REQUESTED, CONFIRMED, ENDED = 0, 1, 8
WORDS = 16  # of one connection
NAME_BITS, NUMBER_BITS = 24, 40  # bits of a request in a word; larger values use only the connection
# Arguments for `map`: 32 reads of a word, which take as long as one poll of the connection.
REQUESTS, ENDS = (REQUESTED,) * 32, (ENDED,) * 32
LIKELY = 1  # a value of CONFIRMED: the parent will likely wait here for the next request


class Mailbox:
    """The words of one connection.

    Guarantees: the parent announces a request only after all earlier ones have ended, so the child may start it at
    once. The parent confirms an end only after settling the request.
    """

    __slots__ = ("_mapping", "announced", "last_was_found", "latest", "taken", "words")

    def __init__(self, mapping: FileMapping, index: int) -> None:
        size = ctypes.sizeof(ctypes.c_uint64) * WORDS
        words = (ctypes.c_uint64 * WORDS).from_address(mapping.base + index * size)
        self._mapping = mapping  # kept alive
        self.words = memoryview(words).cast("B").cast("Q")
        self.announced = 0  # in the parent: the latest request announced here
        self.last_was_found = False  # whether the end of the previous request was seen here
        self.taken = self.latest = 0  # in the child: the latest request that came here first; the latest of all

    # -- the parent -----------------------------------------------------------------------------------------------
    def announce_request(self, number: int, name: int) -> None:
        """Announce a request that the child knows; nothing else may be in flight."""
        if not (number >> NUMBER_BITS or name >> NAME_BITS):
            self.announced = number
            self.words[REQUESTED] = number << NAME_BITS | name

    def wait_for(self, number: int) -> None:
        """Tell the child that the parent waits here for the end of a request."""
        self.words[CONFIRMED] = number << 1

    def is_ended(self, number: int) -> bool:
        """Whether the success of a request is announced, in several reads."""
        return number in map(self.words.__getitem__, ENDS)

    def confirm_end(self, number: int) -> None:
        """Confirm that a request is settled."""
        self.last_was_found = True
        self.words[CONFIRMED] = number << 1 | 1

    def expect_message(self, *, likely: bool) -> None:
        """Record that an end came, or will come, over the connection; `likely`: the next may be waited for here."""
        self.announced = 0
        self.last_was_found = False
        self.words[CONFIRMED] = LIKELY if likely else 0

    # -- the child ------------------------------------------------------------------------------------------------
    def request(self) -> tuple[int, int] | None:
        """The number and name of a new request, which has not come over the connection yet, in several reads."""
        least = self.latest + 1 << NAME_BITS
        for word in filter(least.__le__, map(self.words.__getitem__, REQUESTS)):
            self.taken = self.latest = word >> NAME_BITS
            return self.taken, word & (1 << NAME_BITS) - 1
        return None

    def announce_end(self, number: Any) -> bool:
        """Announce the success of a request if the parent is likely to wait here for it; returns whether it is.

        `number` may also be another item of a report, which is never announced.
        """
        words = self.words
        if not words[CONFIRMED] or words[REQUESTED] >> NAME_BITS != number:
            return False
        words[ENDED] = number
        return True

    def is_waited_for(self, number: int) -> bool:
        """Whether the parent is waiting here for the end of that request."""
        return self.words[CONFIRMED] == number << 1

    def is_confirmed(self, number: int) -> bool:
        """Whether the parent has settled the end of that request."""
        return self.words[CONFIRMED] == number << 1 | 1


def mailbox_file(count: int) -> int:
    """The descriptor of a memory file for `count` mailboxes; -1 on other processors than x86."""
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
    """The mailboxes in a file of `mailbox_file`, which may be closed afterwards; None for each if there is no file."""
    if fd < 0:
        return [None] * count
    mapping = FileMapping(_bytes(count), fd)
    return [Mailbox(mapping, index) for index in range(count)]


def _bytes(count: int) -> int:
    return count * WORDS * ctypes.sizeof(ctypes.c_uint64)
