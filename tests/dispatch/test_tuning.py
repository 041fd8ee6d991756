"""The memory of autotune on disk: private, atomic, keyed by GPU and library, rebuilt where it is damaged."""

from __future__ import annotations

import json
import os
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from dispatch.tuning import Algorithm, AlgorithmCache, cache_folder, steadiest

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
    assert steadiest(ratios) == taken
