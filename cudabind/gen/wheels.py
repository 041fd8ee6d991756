"""The headers of a pinned wheel, without installing it: three CUDA releases cannot be installed side by side.

Called by `cudabind.gen` and the tests. pip says where a wheel is; from a server that answers range requests only the
headers are read, some 100 kB of up to 700 MB. They stay in the user's cache. It never changes an environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from http.client import HTTPResponse
    from typing import IO

BLOCK = 1 << 18  # a wheel's directory and its headers are a few blocks of this size
HEADERS = re.compile(r"\.(h|hpp|cuh)$|/nv/")  # what is in the nv folder of CCCL has no suffix
TIMEOUT = 60  # seconds without an answer


class WheelError(Exception):
    """A pinned wheel could not be found or read; the text has pip's words or the URL."""


class Wheel(NamedTuple):
    """A wheel on the package index, by its exact version."""

    package: str
    version: str

    @property
    def folder(self) -> Path:
        """Where its headers are kept."""
        return cache_folder() / "headers" / f"{self.package}-{self.version}"


def cache_folder() -> Path:
    """`CUDABIND_CACHE`, else `cudabind` in the user's cache folder."""
    own = os.environ.get("CUDABIND_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cudabind"


def fetch(wheels: Iterable[Wheel]) -> None:
    """Have the headers of these wheels in the cache; wheels of one package in two versions need a call each.

    Raises:
        WheelError: the package index does not have a wheel, or it cannot be read.
    """
    missing = [wheel for wheel in dict.fromkeys(wheels) if not wheel.folder.is_dir()]
    if not missing:
        return
    urls = _resolve(missing)
    with ThreadPoolExecutor(8) as pool:  # waiting for the server is most of the time
        list(pool.map(_extract, missing, [urls[wheel.package] for wheel in missing]))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the cache of headers: a process that waits for it finds there what the one before has fetched."""
    folder = cache_folder() / "headers"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def include(wheel: Wheel) -> tuple[Path, ...]:
    """The folders of a fetched wheel to include headers from; CCCL's are in one of their own."""
    root = wheel.folder
    found = [path for path in root.rglob("include") if "include" not in path.relative_to(root).parts[:-1]]
    inner = [path / "cccl" for path in found if (path / "cccl").is_dir()]
    return tuple(sorted([*found, *inner]))


def _resolve(wheels: list[Wheel]) -> dict[str, str]:
    """Ask pip for the URLs: it knows the user's indexes, proxies and credentials."""
    pins = [f"{wheel.package}=={wheel.version}" for wheel in wheels]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--report", "-", "-qq"]
    # Of a wheel without metadata beside it on the index, pip reads the metadata alone: 12 wheels in 2 s and not in 60.
    command += ["--use-feature=fast-deps"]
    command += ["--no-deps", "--ignore-installed", "--only-binary", ":all:", *pins]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"pip does not find {', '.join(pins)}: {done.stderr.strip()}")
    found = json.loads(done.stdout)["install"]
    # A wheel may spell its own name with other hyphens than its pin.
    return {re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower(): each["download_info"]["url"] for each in found}


def _extract(wheel: Wheel, url: str) -> None:
    wheel.folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=wheel.folder.name, dir=wheel.folder.parent))
    try:
        with _open(url) as file, zipfile.ZipFile(file) as archive:
            archive.extractall(made, [name for name in archive.namelist() if HEADERS.search(name)])
        with contextlib.suppress(FileExistsError, OSError):  # another process may have been first
            made.rename(wheel.folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise WheelError(f"{wheel.package} {wheel.version}, {url}: {error}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
    if not wheel.folder.is_dir():
        raise WheelError(f"{wheel.package} {wheel.version}: {wheel.folder} could not be made")


def _open(url: str) -> IO[bytes]:
    with _request(url, "bytes=0-0") as answer:
        if answer.status == 206:
            size = int(answer.headers["Content-Range"].split("/")[1])
            return cast("IO[bytes]", io.BufferedReader(_Remote(url, size), BLOCK))
        whole = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        shutil.copyfileobj(answer, whole)
        return whole


def _request(url: str, span: str) -> HTTPResponse:
    request = urllib.request.Request(url, headers={"Range": span})
    return cast("HTTPResponse", urllib.request.urlopen(request, timeout=TIMEOUT))


class _Remote(io.RawIOBase):
    """A file on a server as a seekable file; the buffer around it reads ahead."""

    def __init__(self, url: str, size: int) -> None:
        self._url = url
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        with _request(self._url, f"bytes={self._at}-{end - 1}") as answer:
            data = answer.read()
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
