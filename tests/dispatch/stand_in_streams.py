"""Streams and captures of the stand-in for the driver (stand_in.py), and what is behind what on them."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter

GLOBAL, RELAXED = 0, 2
DEFAULTS = [0, 1, 2]


class Streams:
    """What other libraries do on their streams and in captures, and the order of all that is enqueued.

    The attributes are those that `StandIn` has.
    """

    # -- streams of other libraries, and captures -----------------------------------------------------------------
    def begin_theirs(self, handle=None, context=None):
        """A stream of another library; a handle that was destroyed may be given out again."""
        handle = next(self.handles) if handle is None else handle
        assert handle not in self.streams
        self.owners[handle] = context or self.contexts[0]
        self.streams[handle] = next(self.identities)
        return handle

    def end_theirs(self, handle):
        del self.streams[handle]

    def use(self, address, handle):
        """Another library enqueues something that uses memory."""
        self.step(handle, address)

    def begin_capture(self, handle, mode=GLOBAL):
        number = next(self.captures)
        self.capturing[handle] = number, mode
        self.graphs.add(number)
        return number

    def end_capture(self, handle):
        """Whether the graph is there."""
        number, _ = self.capturing[handle]
        for stream, found in self.capturing.copy().items():  # other threads begin and end theirs meanwhile
            if found[0] == number:
                self.capturing.pop(stream, None)
        return number not in self.ended

    def end_graph(self, number):
        self.graphs.discard(number)
        if number in self.semaphores:
            ctypes.CDLL(None).sem_post(self.semaphores.pop(number))

    def is_unsafe(self):
        return self.thread.__dict__.get("mode", GLOBAL) != RELAXED and any(
            mode == GLOBAL for _, mode in self.capturing.copy().values()
        )

    def lose(self, what):
        for number, _ in self.capturing.copy().values():
            self.ended.add(number)
        self.lost.append(what)

    # -- order ----------------------------------------------------------------------------------------------------
    def identity(self, handle):
        handle = int(handle or 0)
        if handle in DEFAULTS:
            return "default", self.current, threading.get_ident() if handle == 2 else 0
        if handle not in self.streams:
            self.touched.append(handle)
            raise AssertionError(f"the stream {handle:#x} is gone")
        return self.streams[handle]

    def clock(self, handle):
        return self.clocks.setdefault(self.identity(handle), Counter())

    def step(self, handle, *addresses):
        clock, identity = self.clock(handle), self.identity(handle)
        capture = self.capturing.get(handle)
        clock[identity] += capture is None  # what is captured runs later, in the order of the graph's launches
        for address in addresses:
            for base, (_, size, _) in self.memory.copy().items():
                if not base <= address < base + max(size, 1):
                    continue
                if capture is None:
                    self.uses.setdefault(base, {})[identity] = clock[identity]
                else:
                    self.in_graphs.setdefault(base, set()).add(capture[0])

    def done(self, clock):
        if self.is_slow:
            return all(self.host[one] >= count for one, count in dict(clock).items())
        self.host.update(clock.copy() - self.host.copy())
        return True
