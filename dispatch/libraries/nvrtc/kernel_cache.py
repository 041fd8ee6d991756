"""Compiled kernels on disk: one file each, private to the user, written atomically, and validated when read.

`compiled.py` and `cutlass/compile.py` look here before they compile, and store the result; `python -m dispatch cache`
lists, exports and imports kernels. An entry contains its own digest, so that a damaged or foreign file is ignored, and
the kernel compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import zipfile
import zlib
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from dispatch.checks import shown
from dispatch.errors import DispatchError
from dispatch.execute import private_files as private
from dispatch.execute.private_files import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["BadPack", "Entry", "Store", "folder", "store"]

MAGIC = b"dispatch-kernel-1\n"
PACK = "dispatch-kernels-1"
LIMIT = 2 << 30  # bytes on disk; the least recently read entries are removed first
LARGEST_CODE = 64 << 20  # bytes of one kernel; CUTLASS's kernels have some hundred KB
LONGEST_TEXT = 2000  # characters of a text field
LONGEST_COMPILE = 1e9  # seconds
MAX_KERNELS = 10_000  # in a pack
MAX_CODE = 2 << 30  # bytes of all kernels in a pack, which are in memory at the same time


class BadPack(DispatchError, ValueError):
    """A file that is not a pack of kernels, or one with invalid contents."""


@dataclass(frozen=True)
class Entry:
    """One compiled kernel.

    Attributes:
        kernel: the digest of its source and options.
        toolchain: the versions of the tools that compiled it, as a text; part of the key of kernels compiled here.
        target: the architecture, as NVRTC names it.
        label: a description for users.
        seconds: the compile time.
        code: the cubin.
    """

    kernel: str
    toolchain: str
    target: str
    label: str
    seconds: float
    code: bytes

    def pack(self) -> bytes:
        """The bytes of a file: magic, digest, a line of JSON with the other fields, the compressed cubin."""
        facts = {name: value for name, value in asdict(self).items() if name != "code"}
        body = json.dumps(facts, sort_keys=True).encode() + b"\n" + zlib.compress(self.code, 6)
        return MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body

    @staticmethod
    def unpack(data: bytes) -> Entry | None:
        """The entry in a file's bytes; None unless `pack` has written them."""
        try:
            if not data.startswith(MAGIC):
                return None
            digest, _, body = data[len(MAGIC) :].partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                return None
            line, _, packed = body.partition(b"\n")
            facts = json.loads(line)
            return Entry(**facts, code=_inflated(packed)) if _is_sound(facts) else None
        except (ValueError, TypeError, zlib.error, RecursionError, MemoryError):
            return None


def _is_sound(facts: Any) -> bool:
    """Whether the fields of an entry are valid; invalid ones must not be printed, or used as a file's name."""
    if not isinstance(facts, dict) or set(facts) != {"kernel", "toolchain", "target", "label", "seconds"}:
        return False
    seconds = facts["seconds"]
    texts = [value for name, value in facts.items() if name != "seconds"]
    if not all(isinstance(text, str) and len(text) <= LONGEST_TEXT and text.isprintable() for text in texts):
        return False
    return isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and 0 <= seconds <= LONGEST_COMPILE


def _inflated(packed: bytes) -> bytes:
    """The decompressed code, up to the largest size of a kernel; ValueError beyond it, or if more data follows."""
    stream = zlib.decompressobj()
    code = stream.decompress(packed, LARGEST_CODE + 1)
    if len(code) > LARGEST_CODE or not stream.eof or stream.unused_data:
        raise ValueError("no kernel")
    return code


def folder() -> Path:
    """The folder of compiled kernels."""
    return cache_folder() / "kernels"


class Store:
    """The entries of a folder, by kernel and toolchain; imported ones by kernel alone."""

    def __init__(self, path: Path) -> None:
        from cuda.core.utils import FileStreamProgramCache

        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = path.stat()
            if facts.st_uid != os.getuid():
                raise DispatchError(f"{path} belongs to another user: set CUDABIND_CACHE to a folder of your own")
            if stat.S_IMODE(facts.st_mode) & 0o077:
                path.chmod(0o700)
            files = FileStreamProgramCache(path, max_size_bytes=LIMIT)
        except OSError as error:
            raise DispatchError(
                f"no kernels can be stored in {path}: {error}. Set CUDABIND_CACHE to another folder"
            ) from error
        self.path = path
        self._files: Any = files

    def find(self, kernel: str, toolchain: str | None) -> Entry | None:
        """A kernel compiled with this toolchain here, or imported from a pack; None if there is no valid one."""
        for key in ([_key(kernel, toolchain)] if toolchain else []) + [_key(kernel, "")]:
            entry = self._read(key)
            if entry is not None and entry.kernel == kernel:
                return entry
        return None

    def _read(self, key: bytes) -> Entry | None:
        try:
            data = self._files.get(key)
        except OSError:  # not readable by this user, such as a file written with sudo, or not a file
            return None
        return None if data is None else Entry.unpack(data)

    def put(self, entry: Entry, *, imported: bool = False) -> None:
        """Store an entry; an imported one is found with any toolchain, or none."""
        try:
            self._files[_key(entry.kernel, "" if imported else entry.toolchain)] = entry.pack()
        except OSError as error:
            raise DispatchError(f"{entry.label} cannot be stored in {self.path}: {error}") from error

    def entries(self) -> Iterator[tuple[Path, Entry | None]]:
        """Each file, with its entry, or None if it is damaged."""
        for path in sorted((self.path / "entries").rglob("*")):
            entry = None
            with contextlib.suppress(OSError):
                if not path.is_file():
                    continue
                entry = Entry.unpack(private.read(path))
            yield path, entry

    def clear(self) -> int:
        """Delete all entries; returns their number."""
        count = len(self._files)
        self._files.clear()
        return count

    def export_pack(self, target: Path, kernels: Iterable[str] | None = None) -> int:
        """Write the valid entries (of `kernels`, if given) to a pack; returns their number."""
        wanted = None if kernels is None else set(kernels)
        chosen = {e.kernel: e for _, e in self.entries() if e is not None and (wanted is None or e.kernel in wanted)}
        if not target.name:
            raise BadPack(f"{target} is not a file name")
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with zipfile.ZipFile(partial, "x") as pack:  # "x" does not follow links: it fails if there is one
                pack.writestr("pack", PACK)
                for kernel, entry in sorted(chosen.items()):
                    pack.writestr(kernel, entry.pack())
            os.replace(partial, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise DispatchError(f"{target} cannot be written: {error}") from error
        return len(chosen)

    def import_pack(self, source: Path, targets: Iterable[str] | None = None) -> list[Entry]:
        """Store the entries of a pack (for the architectures `targets`, if given); BadPack, and none, if invalid."""
        try:
            entries = _unpacked(source)
        except BadPack:
            raise
        except OSError as error:
            raise BadPack(f"{source} is not a pack of kernels: {error.strerror or error}") from error
        except Exception as error:
            # For a damaged zip file, the reader raises errors of struct, codecs, decompressors or passwords.
            raise BadPack(f"{source} is not a pack of kernels: {type(error).__name__}: {shown(str(error))}") from error
        wanted = None if targets is None else set(targets)
        selected = [entry for entry in entries if wanted is None or entry.target in wanted]
        for entry in selected:
            self.put(entry, imported=True)
        return selected


def _unpacked(source: Path) -> list[Entry]:
    """The entries of a pack; BadPack, or any error of zipfile, for an invalid one."""
    entries, code_bytes = [], 0
    with zipfile.ZipFile(source) as pack:
        names = pack.infolist()
        if len(names) > MAX_KERNELS or len({info.filename for info in names}) < len(names):
            raise BadPack(f"{source} contains {len(names)} entries, or duplicates: export the pack again")
        for info in names:
            # Entries are stored without compression by zip, so that their sizes are known before they are read.
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > LARGEST_CODE:
                raise BadPack(f"{shown(info.filename)} in {source} is not a kernel: export the pack again")
        if pack.getinfo("pack").file_size != len(PACK) or pack.read("pack") != PACK.encode():
            raise BadPack(f"{source} is a pack of another kind")
        for info in names:
            if info.filename == "pack":
                continue
            entry = Entry.unpack(pack.read(info))
            if entry is None or entry.kernel != info.filename:
                raise BadPack(f"{shown(info.filename)} in {source} is damaged: export the pack again")
            code_bytes += len(entry.code)
            if code_bytes > MAX_CODE:
                raise BadPack(f"{source} holds more than {MAX_CODE} bytes of kernels, more than any pack needs")
            entries.append(entry)
    return entries


def _key(kernel: str, toolchain: str) -> bytes:
    return hashlib.sha256(f"{kernel}\n{toolchain}".encode()).digest()


@cache
def _store(path: Path) -> Store:
    return Store(path)


def store() -> Store:
    """The user's store."""
    return _store(folder())
