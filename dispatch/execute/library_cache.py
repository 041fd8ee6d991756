"""Caches that a library itself writes to a file and reads again, such as kernels that it has compiled, on disk.

What a library makes of a damaged file it says nowhere. So its bytes lie in a file of ours, behind a line that says what
they are for and a digest of them, and it is given a copy of what is sound. Nothing here knows a library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cudabind._fork import anew
from cudabind.errors import CudaError
from dispatch.execute import private_files as private
from dispatch.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PATTERN", "LibraryCache", "Stored"]

FORMAT = 1
PATTERN = "library-*.cache*"  # with what a process that was killed while writing left behind
HEADER = 4096  # bytes of the first line at most


class Stored(NamedTuple):
    """What is in a file: what it is a cache of, for which GPU model and which version of a library, and its bytes."""

    kind: str
    gpu: str
    library: str
    data: bytes

    @classmethod
    def unpack(cls, packed: bytes) -> Stored | None:
        """What stands in a file's bytes; None where they are damaged, or of another format."""
        line, found, data = packed.partition(b"\n")
        if not found or len(line) > HEADER:
            return None
        try:
            facts: dict[str, Any] = json.loads(line)
            kind, gpu, library, digest = (facts[name] for name in ("kind", "gpu", "library", "digest"))
            is_ours = facts["format"] == FORMAT and all(isinstance(value, str) for value in (kind, gpu, library))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not is_ours or digest != hashlib.sha256(data).hexdigest():
            return None
        return cls(kind, gpu, library, data)

    def pack(self) -> bytes:
        """The bytes of a file."""
        facts = {"format": FORMAT, "kind": self.kind, "gpu": self.gpu, "library": self.library}
        return json.dumps({**facts, "digest": hashlib.sha256(self.data).hexdigest()}).encode() + b"\n" + self.data


class LibraryCache:
    """One cache of a library's, for one GPU model and one version of it.

    Guarantees: a library reads only what a process of this user's has had it write, whole, for the same GPU model and
    version. What cannot be read or written is logged, and is no error.
    """

    def __init__(self, kind: str, gpu: str, library: str, folder: Path | None = None) -> None:
        name = "".join(c if c.isalnum() else "-" for c in f"{kind}-{gpu}-{library}")
        self.path = (folder or private.cache_folder()) / f"library-{name}.cache"
        self._empty = Stored(kind, gpu, library, b"")
        self._lock = threading.Lock()
        anew(self, "_lock", threading.Lock)
        self._last: bytes | None = None  # a digest of what was last read or written here

    def load(self, read: Callable[[bytes], None]) -> bool:
        """Have a library read what is on disk, from a file of this name; whether there was something that it took."""
        with self._lock:
            return self._load(read)

    def save(self, write: Callable[[bytes], None], merge: Callable[[bytes], None] | None = None) -> bool:
        """Have a library write its cache to a file of this name, and keep that; whether it is there now.

        `merge` reads as in `load` what other processes have written since, so that it is in what is written.
        """
        with self._lock:
            try:
                with private.locked(self.path.parent):
                    if merge is not None:
                        self._load(merge)
                    with self._file() as path:
                        write(os.fsencode(path))
                        data = path.read_bytes()
                    if not data or len(data) + HEADER > private.LARGEST:
                        return False
                    digest = hashlib.sha256(data).digest()
                    if digest != self._last or not self.path.exists():
                        private.write(self.path, self._empty._replace(data=data).pack())
                        self._last = digest
            except (OSError, CudaError) as error:
                log("not cached", {"path": str(self.path), "cause": error})
                return False
            return True

    def _load(self, read: Callable[[bytes], None]) -> bool:
        try:
            stored = Stored.unpack(private.read(self.path))
        except OSError:
            return False  # absent, or somebody else's
        if stored is None or stored._replace(data=b"") != self._empty:
            log("not read", {"path": str(self.path), "cause": "it is damaged, and is written anew"})
            return False
        digest = hashlib.sha256(stored.data).digest()
        if digest == self._last:
            return True
        try:
            with self._file() as path:
                path.write_bytes(stored.data)
                read(os.fsencode(path))
        except (OSError, CudaError) as error:
            log("not read", {"path": str(self.path), "cause": error})
            return False
        self._last = digest
        return True

    @contextlib.contextmanager
    def _file(self) -> Iterator[Path]:
        """An empty file beside the cache, for this user alone and for as long as the block."""
        private.own_folder(self.path.parent)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)  # of mode 0600
        os.close(handle)
        try:
            yield Path(name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
