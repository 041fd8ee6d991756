"""Which libraries may not be mixed, with the system's own loader: small ones built here, and NVIDIA's where installed.

Each case is a process of its own, because what a process has once loaded answers to its soname for good.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cudabind import _load
from cudabind.errors import LibraryNotFound

# Steps: "load FILE" is what another package would do, "set NAME=VALUE" sets a variable, "open NAME" is cudabind.
PROGRAM = """
import ctypes, json, os, sys
import cudabind
from cudabind import _load
from cudabind.errors import CudaError

def row(name, needs=(), twin="", parts=""):
    version = "" if name == "solverMg" else f"{name}Version"
    return cudabind.Library(name, f"cudabind.sys.{name}", f"lib{name}.so.1", version, "pair", "x", needs, twin, parts)

if sys.argv[1] == "fakes":
    rows = [row("blas"), row("solver", ("blas",)), row("solverMg", twin="solver"), row("dnn", parts="libdnn_*.so.1")]
    cudabind.LIBRARIES.clear()
    cudabind.LIBRARIES.update({each.name: each for each in rows})
said = []
for step in sys.argv[2:]:
    verb, _, rest = step.partition(" ")
    if verb == "load":
        ctypes.CDLL(rest)
    elif verb == "set":
        os.environ.update([rest.split("=")])
    else:
        try:
            said.append(f"{_load.version(rest)} {_load.path(rest)}")
        except CudaError as error:
            said.append(f"{type(error).__name__} {error}")
json.dump(said, sys.stdout)
"""
VERSION = "int {}Version(int *a, int *b) {{ *a = {}; *b = {}; return 0; }}\n"


def run(kind: str, *steps: str, **env: str) -> list[str]:
    """Run the steps in a new process; what each `open` said: version and file, or the error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDABIND_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind, *steps], capture_output=True, text=True, env=kept | env)
    assert done.returncode == 0, done.stderr
    said: list[str] = json.loads(done.stdout)
    return said


@dataclass(frozen=True)
class Release:
    """A folder with libraries of one release, the solvers linked with the blas beside them."""

    folder: Path
    number: int
    files: dict[str, Path] = field(default_factory=dict)

    def build(self, name: str, source: str = "", link: tuple[str, ...] = ()) -> None:
        code = self.folder / f"{name}.c"
        code.write_text(VERSION.format(name, self.number, 0) + source)
        file = self.folder / f"lib{name}.so.1"
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{file.name}", "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN"]
        subprocess.run(["gcc", *flags, "-o", file, code, *link], check=True)
        self.files[name] = file

    def __getitem__(self, name: str) -> str:
        return str(self.files[name])


def release(folder: Path, number: int) -> Release:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder.mkdir()
    made = Release(folder, number)
    made.build("blas", "int blasNew(void) { return 1; }\n" if number >= 2 else "")
    use = "int blasNew(void);\nint solve(void) { return blasNew(); }\n" if number == 3 else ""
    made.build("solver", use, (made["blas"],))
    made.build("solverMg")
    return made


@pytest.fixture
def one(tmp_path: Path) -> Release:
    return release(tmp_path / "one", 1)


@pytest.fixture
def two(tmp_path: Path) -> Release:
    return release(tmp_path / "two", 2)


def test_one_release_in_one_folder_is_fine(one: Release) -> None:
    env = {"CUDABIND_SOLVER_PATH": str(one.folder), "CUDABIND_SOLVERMG_PATH": str(one.folder)}
    assert run("fakes", "open solver", "open solverMg", "open blas", **env) == [
        f"1.0 {one['solver']}",
        f"1.0 {one['solverMg']}",
        f"1.0 {one['blas']}",
    ]


def test_an_override_of_what_is_linked_comes_first(one: Release, two: Release) -> None:
    env = {"CUDABIND_SOLVER_PATH": one["solver"], "CUDABIND_BLAS_PATH": two["blas"]}
    (solver,) = run("fakes", "open solver", **env)
    assert solver.startswith("LibraryMismatch")
    for part in (f"solver 1.0 ({one['solver']})", f"blas ({two['blas']})", f"its own is {one['blas']}"):
        assert part in solver
    assert "CUDABIND_SOLVER_PATH and CUDABIND_BLAS_PATH" in solver


def test_a_copy_that_another_package_brought_is_named(one: Release, two: Release) -> None:
    (solver,) = run("fakes", f"load {two['blas']}", "open solver", CUDABIND_SOLVER_PATH=one["solver"])
    assert solver.startswith("LibraryMismatch")
    assert f"does not match blas ({two['blas']}), which is already loaded in this process" in solver


def test_the_same_error_comes_again_and_what_is_sound_still_opens(one: Release, two: Release) -> None:
    env = {"CUDABIND_SOLVER_PATH": one["solver"], "CUDABIND_BLAS_PATH": two["blas"]}
    first, second, blas = run("fakes", "open solver", "open solver", "open blas", **env)
    assert first == second
    assert blas == f"2.0 {two['blas']}"


def test_a_second_copy_beside_the_linked_one_is_refused(one: Release, two: Release) -> None:
    _, blas = run(
        "fakes",
        "open solver",
        f"set CUDABIND_BLAS_PATH={two['blas']}",
        "open blas",
        CUDABIND_SOLVER_PATH=one["solver"],
    )
    assert blas.startswith("LibraryMismatch")
    assert f"({one['solver']}) does not match blas ({two['blas']})" in blas
    assert f"it is linked with {one['blas']}" in blas


def test_a_function_that_the_older_library_lacks_is_named(tmp_path: Path, one: Release) -> None:
    three = release(tmp_path / "three", 3)
    (solver,) = run("fakes", f"load {one['blas']}", "open solver", CUDABIND_SOLVER_PATH=three["solver"])
    assert solver.startswith("LibraryMismatch")
    assert f"{three['solver']} needs blasNew" in solver
    assert "of different releases" in solver


def test_a_toolkit_on_the_library_path_does_not_disturb(one: Release, two: Release) -> None:
    env = {"CUDABIND_SOLVER_PATH": one["solver"], "CUDABIND_BLAS_PATH": one["blas"]}
    said = run("fakes", "open solver", "open blas", LD_LIBRARY_PATH=str(two.folder), **env)
    assert said == [f"1.0 {one['solver']}", f"1.0 {one['blas']}"]


def test_where_nothing_lies_beside_it_the_loaders_check_must_do(tmp_path: Path, one: Release, two: Release) -> None:
    lone = shutil.copy(one["solver"], tmp_path / "libsolver.so.1")
    env = {"CUDABIND_SOLVER_PATH": str(lone), "CUDABIND_BLAS_PATH": two["blas"]}
    assert run("fakes", "open solver", **env) == [f"1.0 {lone}"]


def test_twins_come_from_one_folder(one: Release, two: Release) -> None:
    env = {"CUDABIND_SOLVER_PATH": two["solver"], "CUDABIND_SOLVERMG_PATH": one["solverMg"]}
    (twin,) = run("fakes", "open solverMg", **env)
    assert twin.startswith("LibraryMismatch")
    assert f"solverMg ({one['solverMg']}) does not match solver 2.0 ({two['solver']})" in twin


def test_parts_come_from_the_folder_of_the_whole(one: Release, two: Release) -> None:
    for made in (one, two):
        made.build("dnn_graph")
        made.build("dnn")
    env = {"CUDABIND_DNN_PATH": str(one.folder)}
    assert run("fakes", "open dnn", **env) == [f"1.0 {one['dnn']}"]
    assert run("fakes", f"load {one['dnn_graph']}", "open dnn", **env) == [f"1.0 {one['dnn']}"]
    (mixed,) = run("fakes", f"load {two['dnn_graph']}", "open dnn", **env)
    assert mixed.startswith("LibraryMismatch")
    assert f"{one['dnn']} does not match {two['dnn_graph']}" in mixed
    assert f"set CUDABIND_DNN_PATH to {two.folder}" in mixed


def installed(library: str) -> Path:
    try:
        return Path(_load.path(library))
    except LibraryNotFound as missing:
        pytest.skip(f"{library} is not installed: {missing.hint}")


def test_cudnn_without_its_parts_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    file = installed("cudnn")
    lone = shutil.copy(file, tmp_path)
    (cudnn,) = run("real", "open cudnn", CUDABIND_CUDNN_PATH=str(tmp_path))
    assert cudnn.startswith("LibraryMismatch")
    assert f"{lone} is not in the same folder as its own parts" in cudnn


def test_a_part_of_another_cudnn_is_named(tmp_path: Path) -> None:
    folder = installed("cudnn").parent
    other = shutil.copy(folder / "libcudnn_cnn.so.9", tmp_path)
    others = [f"load {folder}/libcudnn_{part}.so.9" for part in ("graph", "ops")]  # what libcudnn_cnn is linked with
    (cudnn,) = run("real", *others, f"load {other}", "open cudnn")
    assert cudnn.startswith("LibraryMismatch")
    assert f"does not match {other}" in cudnn


def test_cutensormg_of_another_folder_than_cutensor_is_refused(tmp_path: Path) -> None:
    file = installed("cutensorMg")
    lone = shutil.copy(file, tmp_path)
    cutensor, mg = run("real", "open cutensor", "open cutensorMg", CUDABIND_CUTENSORMG_PATH=str(lone))
    assert cutensor.endswith(str(file.with_name("libcutensor.so.2")))
    assert mg.startswith("LibraryMismatch")
    assert lone in mg
    assert str(file.with_name("libcutensor.so.2")) in mg


def test_cusolver_is_linked_with_the_cublas_in_use() -> None:
    installed("cusolverDn")
    solver, blas, sparse = run("real", "open cusolverDn", "open cublas", "open cusparse")
    assert [Path(said.split()[1]).name.split(".")[0] for said in (solver, blas, sparse)] == [
        "libcusolver",
        "libcublas",
        "libcusparse",
    ]


def test_an_override_holds_for_what_cuda_python_opens(tmp_path: Path) -> None:
    file = installed("nvJitLink")
    copy = shutil.copy(file, tmp_path)
    code = (
        "from cudabind import nvjitlink; nvjitlink.nvJitLinkVersion()\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'libnvJitLink' in line})"
    )
    env = {**os.environ, "CUDABIND_NVJITLINK_PATH": str(copy)}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert said.stdout.strip() == str({str(copy)})


def test_an_override_that_comes_too_late_for_cuda_python_is_refused(tmp_path: Path) -> None:
    file = installed("nvJitLink")
    copy = shutil.copy(file, tmp_path)
    (late,) = run("real", f"load {file}", "open nvJitLink", CUDABIND_NVJITLINK_PATH=str(copy))
    assert late.startswith("LibraryMismatch")
    assert f"names {copy}, but {file} is already loaded in this process" in late
