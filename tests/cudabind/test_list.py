"""`python -m cudabind list`: what it prints, for people and for programs, and when its exit status is not 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import cudabind
from cudabind import _load, runtime
from cudabind.errors import LibraryNotFound

KEYS = {
    "library",
    "area",
    "module",
    "path",
    "found_by",
    "version",
    "functions",
    "resolved",
    "missing",
    "install",
    "problem",
    "note",
}


def listing(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDABIND_")}
    command = [sys.executable, "-W", "error", "-m", "cudabind", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=kept | env)


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    done = listing("list", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return {row["library"]: row for row in json.loads(done.stdout)}


def test_every_library_is_listed_once_with_every_key(rows: dict[str, dict[str, Any]]) -> None:
    assert list(rows) == list(cudabind.LIBRARIES)
    for row in rows.values():
        assert set(row) == KEYS
        assert row["functions"] == row["resolved"] + len(row["missing"])


@pytest.mark.parametrize("name", cudabind.LIBRARIES)
def test_what_is_found_has_a_path_and_what_is_not_what_to_install(name: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[name]
    try:
        path = _load.path(name)
    except LibraryNotFound:
        assert (row["path"], row["version"], row["functions"]) == (None, None, 0)
        assert row["install"] == _load.install(name)
        assert "was not found" in row["problem"]
    else:
        assert (row["path"], row["version"]) == (path, _load.version(name))
        assert row["found_by"]
        assert not row["install"]
        assert not row["problem"]
        assert row["functions"] > 10


def test_the_runtime_in_use_is_named_beside_the_one_found(rows: dict[str, dict[str, Any]]) -> None:
    version = runtime.cudaRuntimeGetVersion()
    assert rows["cudart"]["note"].endswith(f"own copy of the runtime, {version // 1000}.{version % 1000 // 10}")


def test_the_table_has_a_line_per_library(rows: dict[str, dict[str, Any]]) -> None:
    done = listing("list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["library", "version", "functions", "resolved", "missing", "path"]
    areas = [*dict.fromkeys(row["area"] for row in rows.values())]
    assert [line.removeprefix("# ") for line in lines if line.startswith("# ")] == areas
    own = [line for line in lines[1:] if not line.startswith("# ")]
    for line, row in zip(own, rows.values(), strict=False):
        assert line.split()[0] == row["library"]
        assert line.endswith(row["path"] or f"install: {row['install']}")
    assert f"cudart: {rows['cudart']['note']}" in lines


def test_absence_is_no_failure_but_a_wrong_override_is(tmp_path: Path) -> None:
    done = listing("list", CUDABIND_NCCL_PATH=str(tmp_path / "libnccl.so.2"))
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("nccl "))
    assert line.split()[1] == "unusable"
    assert line.endswith("see below")
    assert f"CUDABIND_NCCL_PATH={tmp_path / 'libnccl.so.2'}: " in done.stdout


def test_nothing_installed_is_listed_too(tmp_path: Path) -> None:
    """In an environment that has cuda-python and this package, and not one of NVIDIA's libraries."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "cudabind").symlink_to(Path(cudabind.__file__).parent)
    bindings = metadata.distribution("cuda-bindings")
    site = Path(str(bindings.locate_file("")))
    for name in ("cuda", f"cuda_bindings-{bindings.version}.dist-info"):
        (packages / name).symlink_to(site / name)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "CONDA", "LD_"))}
    command = [tmp_path / "bare/bin/python", "-m", "cudabind", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=kept | {"PYTHONPATH": str(packages)}, cwd="/")
    assert (done.returncode, done.stderr) == (0, "")
    listed = {row["library"]: row for row in json.loads(done.stdout)}
    assert list(listed) == list(cudabind.LIBRARIES)
    absent = [row for row in listed.values() if row["path"] is None]
    if not absent:
        pytest.skip("the system itself has every library, in a toolkit beside the wheels")
    for row in absent:
        assert row["install"]
        assert "cuda.pathfinder: " in row["problem"] or "-packages: no such file" in row["problem"]


def test_a_command_that_is_not_there_is_a_usage_error() -> None:
    done = listing("lost")
    assert done.returncode == 2
    assert "invalid choice: 'lost'" in done.stderr
    assert listing().returncode == 2
