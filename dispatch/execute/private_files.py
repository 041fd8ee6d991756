"""Cache files that only this user can have written, because libraries and GPUs execute their content.

The caches of algorithms and of compiled kernels use it. A file or folder that belongs to another user, that another
user may write to, or that cannot be read, counts as missing. Nothing here depends on the purpose of the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["cache_folder", "locked", "own_folder", "read", "write"]

LARGEST = 1 << 28  # the largest size in bytes of a file that is read
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder() -> Path:
    """The folder of all caches: CUDABIND_CACHE, or `cudabind` in the user's cache folder.

    For a user without a home it is a folder with the user's id in the system's folder for temporary files.
    """
    configured = os.environ.get("CUDABIND_CACHE")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "cudabind"
    try:
        return Path.home() / ".cache" / "cudabind"
    except RuntimeError:  # no HOME, and the user is not in the system's list
        return Path(tempfile.gettempdir()) / f"cudabind-{os.getuid()}"


def is_own(facts: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user and nobody else may write to it."""
    return facts.st_uid == os.getuid() and not facts.st_mode & OTHERS


def own_folder(path: Path) -> None:
    """Create a folder if there is none, and make it writable by this user only; OSError if that fails."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = path.stat()
    if facts.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user: set CUDABIND_CACHE to a folder of your own")
    if not is_own(facts):  # created as a parent folder, with a umask that lets a group write
        path.chmod(stat.S_IMODE(facts.st_mode) & ~OTHERS)


def read(path: Path) -> bytes:
    """The content of a file of this user in a folder of this user; OSError for any other file."""
    if not is_own(path.parent.stat()):
        raise PermissionError(f"{path.parent} belongs to another user or is writable by others")
    # Refuse links, which may lead to another user's file, and do not block on a pipe.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or not is_own(facts) or facts.st_size > LARGEST:
            raise PermissionError(f"{path} is not a regular file that only this user may write")
        return file.read(LARGEST)


def write(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old content or the new one."""
    own_folder(path.parent)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # of mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A block that only one process at a time can enter, for one folder; without effect if there are no file locks.

    The folder itself is locked, so no lock file is left behind, and a process that is killed releases the lock.
    """
    own_folder(folder)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _locking.add(handle)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)  # a process forked meanwhile may have the descriptor, too
        _locking.discard(handle)
        os.close(handle)


def _after_fork() -> None:
    """In a forked process: drop the parent's locks; else the child would wait for them forever."""
    for handle in list(_locking):
        with contextlib.suppress(OSError):
            os.close(handle)
    _locking.clear()


_locking: set[int] = set()  # descriptors
os.register_at_fork(after_in_child=_after_fork)
