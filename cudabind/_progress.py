"""Progress of what takes long, on stderr: one line that is rewritten on a terminal, elsewhere a line now and then.

Nothing is shown of what is done within two seconds. Where stderr is no terminal only command lines show anything
(`tell_pipes`): a program that merely uses the library keeps its log to itself.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import Any

from cudabind._terminal import elided, paint

__all__ = ["Progress", "duration", "tell_pipes"]

PATIENCE = 2.0  # seconds before anything is shown
OFTEN, SELDOM = 0.2, 10.0  # seconds between two looks of a terminal, and between two lines elsewhere
_pipes = False


def tell_pipes(on: bool = True) -> None:
    """Show progress also where stderr is no terminal, or not any more."""
    global _pipes
    _pipes = on


class Progress:
    """How much of `total` is done, and about how long the rest takes; a context manager.

    With `ticking` a thread keeps the time current while one step takes long; without, each `update` does.
    """

    def __init__(self, title: str, total: int, *, ticking: bool = False) -> None:
        self.title, self.total, self.done = title, total, 0
        self._begun = time.monotonic()
        self._stream: Any = sys.stderr
        self._rewrites = bool(self._stream is not None and self._stream.isatty())
        self._next = self._begun + PATIENCE if self._rewrites or _pipes else float("inf")
        self._shown = ""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        if ticking and self._next < float("inf"):
            threading.Thread(target=self._tick, daemon=True, name="progress").start()

    def __enter__(self) -> Progress:  # noqa: PYI034  # Self is of 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        self.look()

    def look(self) -> None:
        """Show where it stands, if it is time to."""
        now = time.monotonic()
        if now < self._next:
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._next = now + (OFTEN if self._rewrites else SELDOM)
            self._write(self.text(now - self._begun))

    def text(self, seconds: float) -> str:
        """Where it stands after so long."""
        parts = [f"{self.done} of {self.total}", duration(seconds)]
        if 0 < self.done < self.total:
            parts.append(f"about {duration(seconds * (self.total - self.done) / self.done)} left")
        return f"{self.title}: {', '.join(parts)}"

    def close(self) -> None:
        """The line goes away; what came of it is told by others."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            if self._shown and self._rewrites:
                self._put("\r\x1b[K")

    def _tick(self) -> None:
        while not self._ended.wait(OFTEN):
            self.look()

    def _write(self, text: str) -> None:
        if self._rewrites and text == self._shown:
            return
        self._shown = text
        if self._rewrites:
            shown = elided(text, shutil.get_terminal_size().columns - 1)
            self._put(f"\r{paint(shown, 'dim', self._stream)}\x1b[K")
        else:
            self._put(f"{text}\n")

    def _put(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads it
            self._next = float("inf")


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 6000:
        return f"{round(whole / 60)} min"
    return f"{whole / 3600:.1f} h"
