"""Progress of long operations, on stderr: one line that is rewritten on a terminal, elsewhere a line now and then.

Nothing is shown for operations of less than two seconds. If stderr is not a terminal, only the command lines show
progress (`tell_pipes`), so that programs which use the library keep their logs clean.
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
OFTEN, SELDOM = 0.2, 10.0  # seconds between two updates on a terminal, and between two lines elsewhere
_pipes = False


def tell_pipes(on: bool = True) -> None:
    """Set whether progress is shown also if stderr is no terminal."""
    global _pipes
    _pipes = on


class Progress:
    """Shows how much of `total` is done, and about how long the rest takes; a context manager.

    With `ticking`, a thread updates the time during long steps; without, only `update` does.
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
        """Count `count` more as done."""
        self.done += count
        self.look()

    def look(self) -> None:
        """Show the progress, if an update is due."""
        now = time.monotonic()
        if now < self._next:
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._next = now + (OFTEN if self._rewrites else SELDOM)
            self._write(self.text(now - self._begun))

    def text(self, seconds: float) -> str:
        """The text of the line after so many seconds."""
        parts = [f"{self.done} of {self.total}", duration(seconds)]
        if 0 < self.done < self.total:
            parts.append(f"about {duration(seconds * (self.total - self.done) / self.done)} left")
        return f"{self.title}: {', '.join(parts)}"

    def close(self) -> None:
        """Remove the line."""
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
        except (OSError, ValueError):  # stderr was closed
            self._next = float("inf")


def duration(seconds: float) -> str:
    """A time as text, such as 12 s, 3 min or 1.5 h."""
    rounded = round(seconds)
    if rounded < 100:
        return f"{rounded} s"
    if rounded < 6000:
        return f"{round(rounded / 60)} min"
    return f"{rounded / 3600:.1f} h"
