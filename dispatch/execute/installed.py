"""The installed versions of the libraries that rows call, and their caches of autotune's outcomes.

Executors use it. A library's version is read when one of its rows is first tried; nothing else of it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from cudabind import LIBRARIES, _load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dispatch.execute.algorithm_cache import AlgorithmCache

__all__ = ["ANY_VERSION", "Versions", "algorithms", "installed"]

Versions = Mapping[str, tuple[int, ...]]
ANY_VERSION: Versions = {}


class _Installed(Mapping[str, tuple[int, ...]]):
    """The version of each library, read at first use; a library that is missing raises cudabind's error.

    A library that cudabind does not bind belongs to a user: it has no entry and counts as new enough.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> tuple[int, ...]:
        found = self._known.get(name)
        if found is None:
            if name not in LIBRARIES:
                raise KeyError(name)
            found = self._known[name] = tuple(int(part) for part in str(_load.version(name)).split("."))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


installed = _Installed()


@cache
def algorithms(gpu: str, library: str, version: str) -> AlgorithmCache:
    """This process's one cache for a GPU model and a version of a library, "" for a library without versions."""
    from dispatch.execute.algorithm_cache import AlgorithmCache  # slow to import

    return AlgorithmCache(gpu, f"{library}-{version}" if version else library)
