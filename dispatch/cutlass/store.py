"""Compiled kernels on disk: one file each, private to the user, written atomically, and read only if it proves sound.

compile.py asks here before it compiles, and stores what it has compiled; `python -m dispatch cache` lists, exports and
imports. An entry carries its own digest, so that a damaged or foreign file is taken for none and rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zipfile
import zlib
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dispatch.errors import DispatchError
from dispatch.tuning import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["BadPack", "Entry", "Store", "folder", "store"]

MAGIC = b"dispatch-kernel-1\n"
PACK = "dispatch-kernels-1"
LIMIT = 2 << 30  # bytes on disk; what was read longest ago goes first


class BadPack(DispatchError, ValueError):
    """A file that is no pack of kernels, or one whose contents are not what it says."""


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        kernel: the digest of its source and options.
        toolchain: what it was compiled with, in words; part of the key of what is compiled here.
        target: the architecture, as NVRTC names it.
        label: what it is, for people.
        seconds: how long it took to compile.
        code: the cubin.
    """

    kernel: str
    toolchain: str
    target: str
    label: str
    seconds: float
    code: bytes

    def pack(self) -> bytes:
        """The bytes of a file: magic, digest, a line of facts, the compressed cubin."""
        facts = {name: value for name, value in asdict(self).items() if name != "code"}
        body = json.dumps(facts, sort_keys=True).encode() + b"\n" + zlib.compress(self.code, 6)
        return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @staticmethod
    def unpack(data: bytes) -> Entry | None:
        """The entry of a file's bytes; None where they are not what `pack` has made."""
        try:
            if not data.startswith(MAGIC):
                return None
            digest, _, body = data[len(MAGIC) :].partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                return None
            line, _, packed = body.partition(b"\n")
            return Entry(**json.loads(line), code=zlib.decompress(packed))
        except (ValueError, TypeError, zlib.error):
            return None


def folder() -> Path:
    """Where compiled kernels lie."""
    return cache_folder() / "cutlass"


class Store:
    """The entries of a folder, by kernel and toolchain; imported ones by kernel alone."""

    def __init__(self, path: Path) -> None:
        from cuda.core.utils import FileStreamProgramCache

        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.stat()
        if facts.st_uid != os.getuid():
            raise DispatchError(f"{path} belongs to another user: name a folder of your own with CUDABIND_CACHE")
        if stat.S_IMODE(facts.st_mode) & 0o077:
            path.chmod(0o700)
        self.path = path
        self._files: Any = FileStreamProgramCache(path, max_size_bytes=LIMIT)

    def find(self, kernel: str, toolchain: str | None) -> Entry | None:
        """A kernel compiled with this toolchain here, or imported from a pack; None where there is no sound one."""
        for key in ([_key(kernel, toolchain)] if toolchain else []) + [_key(kernel, "")]:
            entry = self._read(key)
            if entry is not None and entry.kernel == kernel:
                return entry
        return None

    def _read(self, key: bytes) -> Entry | None:
        data = self._files.get(key)
        return None if data is None else Entry.unpack(data)

    def put(self, entry: Entry, *, imported: bool = False) -> None:
        """Keep an entry; an imported one for whatever toolchain there is, or none."""
        self._files[_key(entry.kernel, "" if imported else entry.toolchain)] = entry.pack()

    def entries(self) -> Iterator[tuple[Path, Entry | None]]:
        """Each file, with its entry or None where it is damaged."""
        for path in sorted((self.path / "entries").rglob("*")):
            if path.is_file():
                yield path, Entry.unpack(path.read_bytes())

    def clear(self) -> int:
        """Delete all entries; how many there were."""
        count = len(self._files)
        self._files.clear()
        return count

    def export_pack(self, target: Path, kernels: Iterable[str] | None = None) -> int:
        """Write the sound entries (of `kernels`, where given) to a pack; how many."""
        wanted = None if kernels is None else set(kernels)
        chosen = {e.kernel: e for _, e in self.entries() if e is not None and (wanted is None or e.kernel in wanted)}
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        with zipfile.ZipFile(partial, "w") as pack:
            pack.writestr("pack", PACK)
            for kernel, entry in sorted(chosen.items()):
                pack.writestr(kernel, entry.pack())
        os.replace(partial, target)
        return len(chosen)

    def import_pack(self, source: Path, targets: Iterable[str] | None = None) -> list[Entry]:
        """Take the entries of a pack (for the architectures `targets`, where given); BadPack, and none, if unsound."""
        found = []
        try:
            with zipfile.ZipFile(source) as pack:
                if pack.read("pack").decode(errors="replace") != PACK:
                    raise BadPack(f"{source} is a pack of another kind")
                for name in pack.namelist():
                    if name == "pack":
                        continue
                    entry = Entry.unpack(pack.read(name))
                    if entry is None or entry.kernel != name:
                        raise BadPack(f"{name} in {source} is damaged: export the pack anew")
                    found.append(entry)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise BadPack(f"{source} is no pack of kernels: {error}") from error
        wanted = None if targets is None else set(targets)
        taken = [entry for entry in found if wanted is None or entry.target in wanted]
        for entry in taken:
            self.put(entry, imported=True)
        return taken


def _key(kernel: str, toolchain: str) -> bytes:
    return hashlib.sha256(f"{kernel}\n{toolchain}".encode()).digest()


@cache
def _store(path: Path) -> Store:
    return Store(path)


def store() -> Store:
    """The user's store."""
    return _store(folder())
