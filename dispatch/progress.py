"""Waiting for kernels that are being compiled, with a progress line on a terminal."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, wait
from typing import TYPE_CHECKING

from cudabind._progress import OFTEN, Progress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

__all__ = ["finish"]


def finish(futures: Iterable[Future[bytes]]) -> None:
    """Wait for kernels; a failure is raised later, by the result() of its future."""
    pending = set(futures)
    with Progress("compile kernels", len(pending)) as bar:
        while pending:
            done, pending = wait(pending, OFTEN, FIRST_COMPLETED)
            bar.update(len(done))
