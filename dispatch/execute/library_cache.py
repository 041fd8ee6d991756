"""Cache files that a library writes and reads itself, such as the kernels that it has compiled.

Libraries do not document how they handle a damaged file. So dispatch stores the bytes in its own file, after a line
with their purpose and digest, and the library reads a verified copy. Nothing here depends on a certain library.
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
PATTERN = "library-*.cache*"  # including temporary files left by a process that was killed
HEADER = 4096  # the maximum length of the first line in bytes


class Stored(NamedTuple):
    """The content of a file: the kind of cache, the GPU model, the library and its version, and the library's bytes."""

    kind: str
    gpu: str
    library: str
    data: bytes

    @classmethod
    def unpack(cls, packed: bytes) -> Stored | None:
        """The content of a file's bytes; None if they are damaged or have another format."""
        line, newline, data = packed.partition(b"\n")
        if not newline or len(line) > HEADER:
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
        """The bytes to write to a file."""
        facts = {"format": FORMAT, "kind": self.kind, "gpu": self.gpu, "library": self.library}
        return json.dumps({**facts, "digest": hashlib.sha256(self.data).hexdigest()}).encode() + b"\n" + self.data


class LibraryCache:
    """One cache of a library, for one GPU model and one version of the library.

    Guarantees: a library reads only complete files that it wrote itself, in a process of this user, for the same GPU
    model and version. Failures to read or write are logged and raise nothing.
    """

    def __init__(self, kind: str, gpu: str, library: str, folder: Path | None = None) -> None:
        name = "".join(c if c.isalnum() else "-" for c in f"{kind}-{gpu}-{library}")
        self.path = (folder or private.cache_folder()) / f"library-{name}.cache"
        self._empty = Stored(kind, gpu, library, b"")
        self._lock = threading.Lock()
        anew(self, "_lock", threading.Lock)
        self._last: bytes | None = None  # the digest of the bytes last read or written here

    def load(self, read: Callable[[bytes], None]) -> bool:
        """Call `read(path)` with a file of the stored bytes; returns whether there were any and they were read."""
        with self._lock:
            return self._load(read)

    def save(self, write: Callable[[bytes], None], merge: Callable[[bytes], None] | None = None) -> bool:
        """Call `write(path)` to make the library write its cache, and store the result; returns whether it is stored.

        If given, `merge` is called first: it reads bytes that other processes have stored since, like `read` in `load`.
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
            return False  # missing, or another user's
        if stored is None or stored._replace(data=b"") != self._empty:
            log("not read", {"path": str(self.path), "cause": "it is damaged, and will be rewritten"})
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
        """A private, empty temporary file in the folder of the cache, for the duration of the block."""
        private.own_folder(self.path.parent)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)  # of mode 0600
        os.close(handle)
        try:
            yield Path(name)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
