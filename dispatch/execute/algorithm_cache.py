"""The outcomes of autotune on disk: the fastest algorithms, for each GPU model and library version.

The file is private to the user and written atomically; a corrupt file is ignored and rebuilt.
"""

from __future__ import annotations

import base64
import json
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudabind._fork import anew
from dispatch.execute import private_files as private
from dispatch.logs import log

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Algorithm", "AlgorithmCache"]

FORMAT = 1


@dataclass(frozen=True)
class Algorithm:
    """A library's algorithm in the library's serialized form, and the workspace that it was measured with."""

    blob: bytes
    workspace: int


class AlgorithmCache:
    """The outcomes of autotune for one GPU model and one library version, in memory and on disk.

    Guarantees: only a file that belongs to this user is read. Outcomes that several processes write at once are all
    kept. If nothing can be written, outcomes are kept in memory until the process ends.
    """

    def __init__(self, gpu: str, library: str, folder: Path | None = None) -> None:
        name = "".join(c if c.isalnum() else "-" for c in f"{gpu}-{library}")
        self.path = (folder or private.cache_folder()) / f"autotune-{name}.json"
        self._stamp = {"format": FORMAT, "gpu": gpu, "library": library}
        self._lock = threading.Lock()
        anew(self, "_lock", threading.Lock)
        self._known: dict[str, Algorithm] | None = None
        self._found: dict[str, Algorithm] = {}  # measured by this process

    def get(self, op: str, key: str) -> Algorithm | None:
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known.get(f"{op} {key}")

    def put(self, op: str, key: str, algorithm: Algorithm) -> None:
        """Store an outcome, merged with what other processes have written meanwhile."""
        with self._lock:
            self._found[f"{op} {key}"] = algorithm
            try:
                with private.locked(self.path.parent):
                    self._known = {**self._read(), **self._found}
                    private.write(self.path, self._text(self._known).encode())
            except OSError as error:
                self._known = {**(self._known or {}), **self._found}
                log("not cached", {"path": str(self.path), "cause": error})

    def _read(self) -> dict[str, Algorithm]:
        try:
            stored = json.loads(private.read(self.path))
            if stored["stamp"] != self._stamp:
                return {}
            entries = dict(stored["algorithms"].items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}  # missing, another user's, or damaged: the next outcome rewrites it
        parsed = ((key, _algorithm(entry)) for key, entry in entries.items())
        return {key: algorithm for key, algorithm in parsed if algorithm is not None}

    def _text(self, algorithms: dict[str, Algorithm]) -> str:
        entries = {key: [base64.b64encode(a.blob).decode(), a.workspace] for key, a in algorithms.items()}
        return json.dumps({"stamp": self._stamp, "algorithms": entries}, indent=1, sort_keys=True)


def _algorithm(entry: object) -> Algorithm | None:
    """One entry of the file; None if it is damaged (the other entries are still used)."""
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and type(entry[1]) is int):
        return None
    blob, workspace = entry
    if not 0 <= workspace < 1 << 62:
        return None
    try:
        return Algorithm(base64.b64decode(blob, validate=True), workspace)
    except ValueError:
        return None
