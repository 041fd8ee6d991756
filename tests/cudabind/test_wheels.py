"""Headers out of a wheel that is not installed: from a server with and without range requests, and from a folder."""

from __future__ import annotations

import random
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pip", reason="pip, which says where a wheel is, is not installed")

from cudabind.gen.wheels import Wheel, WheelError, cache_folder, fetch, include

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.generator

LIBRARY = random.Random(0).randbytes(5_000_000)
HEADER = b"int tinyDo(void);\n" * 1000
MEMBERS = {
    "nvidia/cu13/lib/libtiny.so.1": LIBRARY,
    "nvidia/cu13/include/tiny.h": HEADER,
    "nvidia/cu13/include/tiny/include/inner.hpp": b"// deeper\n",
    "nvidia/cu13/include/cccl/nv/target": b"// no suffix\n",
    "nvidia/cu13/lib/libtiny_more.so.1": LIBRARY,
}
TINY = Wheel("cudabind-test-tiny", "1.2.3.4")


class Server(SimpleHTTPRequestHandler):
    """A folder of files; with `ranges`, parts of them. `sent` counts the bytes of the parts."""

    folder = ""
    ranges = True
    sent = 0

    def translate_path(self, path: str) -> str:
        return self.folder + path

    def log_message(self, *_args: object) -> None:
        return

    def do_GET(self) -> None:
        span = self.headers["Range"]
        if not span or not type(self).ranges:
            super().do_GET()
            return
        data = Path(self.translate_path(self.path)).read_bytes()
        first, last = map(int, span.removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        type(self).sent += len(part)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, the only place that pip looks in, and an empty cache."""
    place = tmp_path / "wheels"
    place.mkdir()
    info = "cudabind_test_tiny-1.2.3.4.dist-info"
    with zipfile.ZipFile(place / "cudabind_test_tiny-1.2.3.4-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in MEMBERS.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: cudabind-test-tiny\nVersion: 1.2.3.4\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    for name, value in {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": place.as_uri(),  # which pip splits at blanks, and a folder may have such
        "PIP_NO_CACHE_DIR": "1",
        "CUDABIND_CACHE": str(tmp_path / "cache"),
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    include.cache_clear()
    return place


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Server]]:
    """The folder on a server."""

    class Ours(Server):
        sent = 0

    Ours.folder = str(folder)
    with ThreadingHTTPServer(("127.0.0.1", 0), Ours) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{running.server_port}/")
        yield Ours
        running.shutdown()
        thread.join()


def check() -> None:
    root = cache_folder() / "headers" / "cudabind-test-tiny-1.2.3.4"
    files = {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
    assert files == {name: data for name, data in MEMBERS.items() if ".so" not in name}
    assert include(TINY) == (root / "nvidia/cu13/include", root / "nvidia/cu13/include/cccl")


@pytest.mark.usefixtures("folder")
def test_a_wheel_in_a_folder_is_read() -> None:
    fetch([TINY])
    check()


def test_of_a_wheel_on_a_server_with_ranges_only_the_headers_are_read(server: type[Server]) -> None:
    fetch([TINY])
    check()
    assert 0 < server.sent < 1_500_000


def test_a_server_without_ranges_sends_the_whole_file(server: type[Server]) -> None:
    server.ranges = False
    fetch([TINY])
    check()
    assert server.sent == 0


def test_what_is_in_the_cache_is_not_fetched_again(folder: Path) -> None:
    fetch([TINY, TINY])
    for file in folder.iterdir():
        file.unlink()
    fetch([TINY])
    check()


@pytest.mark.usefixtures("folder")
def test_a_wheel_that_is_nowhere_is_an_error_with_pips_words() -> None:
    with pytest.raises(WheelError, match=r"cudabind-test-tiny==9\.9.*(No matching|Could not find)"):
        fetch([Wheel("cudabind-test-tiny", "9.9")])


def test_a_wheel_that_breaks_off_leaves_nothing_in_the_cache(
    server: type[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip reads the whole file; of the parts that are asked for afterwards, only the first few come."""
    whole = server.do_GET

    def some(self: Server) -> None:
        if self.headers["Range"] and type(self).sent > 100:
            self.send_error(503)
        else:
            whole(self)

    monkeypatch.setattr(server, "do_GET", some)
    with pytest.raises(WheelError, match=r"cudabind-test-tiny 1\.2\.3\.4, http://127\.0\.0\.1.*503"):
        fetch([TINY])
    assert list((cache_folder() / "headers").iterdir()) == []
