"""Waiting for kernels that are being compiled, with a line of progress where a person watches."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from cudabind._progress import OFTEN, Progress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

__all__ = ["finish"]


def finish(futures: Iterable[Future[bytes]]) -> None:
    """Wait for kernels; what failed says so when its result is asked for."""
    left = set(futures)
    with Progress("compile kernels", len(left)) as bar:
        while left:
            done, left = wait(left, OFTEN, FIRST_COMPLETED)
            bar.update(len(done))
