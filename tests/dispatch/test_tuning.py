"""The memory of autotune on disk: private, atomic, keyed by GPU and library, rebuilt where it is damaged."""

from __future__ import annotations

import errno
import json
import os
import pwd
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache
from dispatch.execute.autotune import pick_fastest
from dispatch.execute.private_files import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

ONE = Algorithm(bytes(range(64)), 1 << 20)
TWO = Algorithm(bytes(64), 0)


@pytest.fixture
def cache(tmp_path: Path) -> AlgorithmCache:
    return AlgorithmCache("GPU", "lib-1.2.3", tmp_path / "deep" / "cache")


def again(cache: AlgorithmCache) -> AlgorithmCache:
    """The cache as another process would open it."""
    return AlgorithmCache("GPU", "lib-1.2.3", cache.path.parent)


def test_an_outcome_is_found_by_another_process(cache):
    assert cache.get("matmul", "k") is None
    cache.put("matmul", "k", ONE)
    assert again(cache).get("matmul", "k") == ONE
    assert again(cache).get("matmul", "other") is None


def test_file_and_folder_are_private(cache):
    cache.put("matmul", "k", ONE)
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b'{"stamp": 1}',
        b'{"stamp": {}, "algorithms": {}}',
    ],
    ids=["empty", "cut", "list", "null", "binary", "no stamp", "foreign"],
)
def test_a_damaged_file_is_ignored_and_rebuilt(cache, damage):
    cache.put("matmul", "old", TWO)
    cache.path.write_bytes(damage)
    opened = again(cache)
    assert opened.get("matmul", "old") is None
    opened.put("matmul", "new", ONE)
    assert again(cache).get("matmul", "new") == ONE


@pytest.mark.parametrize("entry", [["!!", 1], ["AAAA"], "AAAA", ["AAAA", "x"], 3], ids=str)
def test_a_damaged_entry_is_ignored(cache, entry):
    cache.put("matmul", "k", ONE)
    stored = json.loads(cache.path.read_text())
    stored["algorithms"]["matmul k"] = entry
    cache.path.write_text(json.dumps(stored))
    assert again(cache).get("matmul", "k") is None


def test_another_gpu_or_library_has_another_file(cache):
    cache.put("matmul", "k", ONE)
    for gpu, library in (("GPU 2", "lib-1.2.3"), ("GPU", "lib-1.2.4")):
        other = AlgorithmCache(gpu, library, cache.path.parent)
        assert other.path != cache.path
        assert other.get("matmul", "k") is None


def test_a_file_moved_from_another_gpu_is_not_believed(cache):
    other = AlgorithmCache("GPU 2", "lib-1.2.3", cache.path.parent)
    other.put("matmul", "k", ONE)
    other.path.rename(cache.path)
    assert again(cache).get("matmul", "k") is None


def test_outcomes_of_two_processes_are_both_kept(cache):
    other = again(cache)
    assert other.get("matmul", "x") is None  # both have read the empty file
    cache.put("matmul", "x", ONE)
    other.put("matmul", "y", TWO)
    opened = again(cache)
    assert (opened.get("matmul", "x"), opened.get("matmul", "y")) == (ONE, TWO)


def test_a_reader_never_sees_half_a_file(cache):
    cache.put("matmul", "k", ONE)
    stop, bad = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if again(cache).get("matmul", "k") != ONE:
                bad.append("half")

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(100):
        cache.put("matmul", f"n{number}", TWO)
    stop.set()
    reader.join()
    assert not bad
    assert os.listdir(cache.path.parent) == [cache.path.name], "no temporary file stays behind"


WRITER = """
import sys
from pathlib import Path
from dispatch.execute.algorithm_cache import Algorithm, AlgorithmCache
who, folder = sys.argv[1:]
cache = AlgorithmCache("GPU", "lib-1.2.3", Path(folder))
sys.stdin.read()  # until all are here
for number in range(40):
    cache.put("matmul", f"{who} {number}", Algorithm(who.encode(), number))
"""


def test_processes_that_write_at_once_lose_nothing_of_each_other(cache):
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, who, str(cache.path.parent)], stdin=subprocess.PIPE)
        for who in ("one", "two", "three")
    ]
    for process in started:
        process.stdin.close()
    assert [process.wait() for process in started] == [0, 0, 0]
    for who in ("one", "two", "three"):
        for number in range(40):
            assert again(cache).get("matmul", f"{who} {number}") == Algorithm(who.encode(), number)
    assert os.listdir(cache.path.parent) == [cache.path.name]


def test_what_others_may_write_to_is_not_believed(cache):
    cache.put("matmul", "k", ONE)
    for path, mode in (
        (cache.path, 0o620),
        (cache.path, 0o602),
        (cache.path.parent, 0o770),
        (cache.path.parent, 0o707),
    ):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        assert again(cache).get("matmul", "k") is None
        path.chmod(before)
    assert again(cache).get("matmul", "k") == ONE


def test_what_belongs_to_another_user_is_not_believed(cache, monkeypatch):
    cache.put("matmul", "k", ONE)
    monkeypatch.setattr(os, "getuid", lambda: cache.path.stat().st_uid + 1)
    opened = again(cache)
    assert opened.get("matmul", "k") is None
    before = cache.path.read_bytes()
    opened.put("matmul", "other", TWO)  # known here, and written nowhere
    assert opened.get("matmul", "other") == TWO
    assert cache.path.read_bytes() == before


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_file_is_not_believed(cache, kind, tmp_path):
    cache.put("matmul", "k", ONE)
    cache.path.rename(tmp_path / "elsewhere")
    if kind == "link":
        cache.path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        cache.path.mkdir()
    else:
        os.mkfifo(cache.path)
    opened = again(cache)
    assert opened.get("matmul", "k") is None
    opened.put("matmul", "k", TWO)
    assert opened.get("matmul", "k") == TWO


def test_one_damaged_entry_costs_the_others_nothing(cache):
    for key in ("bad", "good"):
        cache.put("matmul", key, ONE)
    stored = json.loads(cache.path.read_text())
    for entry in (["!!", 1], ["AAAA", -1], ["AAAA", 2**70], ["AAAA", True], [None, 1], {}, "AAAA"):
        stored["algorithms"]["matmul bad"] = entry
        cache.path.write_text(json.dumps(stored))
        assert again(cache).get("matmul", "bad") is None
        assert again(cache).get("matmul", "good") == ONE


@pytest.mark.parametrize("how", ["a file in its place", "no permission"])
def test_where_nothing_can_be_written_an_outcome_is_known_until_the_end(how, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    if how == "a file in its place":
        folder.write_text("")
    else:
        monkeypatch.setattr(os, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    cache = AlgorithmCache("GPU", "lib", folder / "deep")
    assert cache.get("matmul", "k") is None
    cache.put("matmul", "k", ONE)
    cache.put("matmul", "l", TWO)
    assert (cache.get("matmul", "k"), cache.get("matmul", "l")) == (ONE, TWO)


def test_a_user_without_a_home_has_a_folder_of_his_own(monkeypatch):
    for name in ("CUDABIND_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    assert cache_folder().name == f"cudabind-{os.getuid()}"


def test_the_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDABIND_CACHE", str(tmp_path / "named"))
    assert cache_folder() == tmp_path / "named"
    monkeypatch.delenv("CUDABIND_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "cudabind"


RACES = {
    "nothing beats the library's choice": ({}, 0),
    "a clear winner": ({3: [0.9, 0.91, 0.89], 0: [1.0, 1.0, 1.0]}, 3),
    "the better of two": ({3: [0.9, 0.91, 0.89], 5: [0.88, 0.87, 0.9]}, 5),
    "faster by no more than the noise": ({3: [0.995, 0.996, 0.994]}, 0),
    "faster on the whole, slower in one race": ({3: [0.8, 0.8, 1.03]}, 0),
    "the steady one, not the fastest": ({3: [0.7, 0.7, 1.03], 5: [0.95, 0.95, 0.96]}, 5),
    "as slow as the noise in one race": ({3: [0.9, 0.9, 1.005]}, 3),
}


@pytest.mark.parametrize(("ratios", "taken"), RACES.values(), ids=RACES.keys())
def test_another_algorithm_is_taken_only_where_it_is_always_as_fast(ratios, taken):
    assert pick_fastest(ratios) == taken
