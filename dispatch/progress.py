"""A bar where a person watches kernels being compiled, and silence elsewhere."""

from __future__ import annotations

import sys
from concurrent.futures import as_completed
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future

__all__ = ["finish"]


def finish(futures: Iterable[Future[bytes]]) -> None:
    """Wait for kernels, with a bar where a person watches; what failed says so when its result is asked for."""
    waited = set(futures)
    bar = _progress(len(waited))
    for _ in as_completed(waited):
        bar.update(1)
    bar.close()


class _NoBar:
    def update(self, _: int) -> None:
        """Nobody watches."""

    def close(self) -> None:
        """Nothing was shown."""


def _progress(total: int) -> Any:
    if not sys.stderr.isatty():
        return _NoBar()
    try:
        from tqdm import tqdm
    except ImportError:
        return _NoBar()
    return tqdm(total=total, desc="compile kernels", leave=False)
