"""What is installed: the versions of the libraries that rows end in, and what autotune has found with them.

Executors ask here. A library is looked at when a row of it first is; nothing here calls one.
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
    """The version of each library, asked when a row of it first is; one that is missing says so with its own error.

    A library that cudabind does not bind is a user's: it is not in here, and taken to be new enough.
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
    """The one cache of this process for a GPU model and a version of a library, "" for one that has none."""
    from dispatch.execute.algorithm_cache import AlgorithmCache  # what reads and writes files takes long to import

    return AlgorithmCache(gpu, f"{library}-{version}" if version else library)
