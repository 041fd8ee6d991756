"""The installed versions of the libraries that rows call, and their caches of autotune's outcomes.

Executors use it. A library's version is read when one of its rows is first tried; no other function is called.
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

    A library that cudabind does not bind is a user's: it has no entry, and its version counts as new enough.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    def __getitem__(self, name: str) -> tuple[int, ...]:
        version = self._known.get(name)
        if version is None:
            if name not in LIBRARIES:
                raise KeyError(name)
            version = self._known[name] = tuple(int(part) for part in str(_load.version(name)).split("."))
        return version

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


installed = _Installed()


@cache
def algorithms(gpu: str, library: str, version: str) -> AlgorithmCache:
    """This process's only cache for a GPU model and a library version; "" for a library without versions."""
    from dispatch.execute.algorithm_cache import AlgorithmCache  # slow to import

    return AlgorithmCache(gpu, f"{library}-{version}" if version else library)
