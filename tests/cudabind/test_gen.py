"""The generator on NVIDIA's headers: what is committed is what it makes of them."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("clang", reason="libclang is not installed: pip install cudabind[gen]")
if shutil.which("gcc") is None:
    pytest.skip("gcc, whose own headers the parser needs, is not installed", allow_module_level=True)

from cudabind import LIBRARIES
from cudabind.gen import __main__ as command
from cudabind.gen import sources
from cudabind.gen.libraries import HEADERS_LEFT_OUT, ROWS
from cudabind.gen.pins import RELEASES, WHEELS
from cudabind.gen.wheels import WheelError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.generator

AREA = LIBRARIES["cublas"].area


def test_every_library_has_a_version_for_every_release() -> None:
    assert {len(pins.versions) for pins in WHEELS} == {len(RELEASES)}
    for row in ROWS:
        versions = [tuple(map(int, sources.version(row, release).split("."))) for release in RELEASES]
        assert versions == sorted(versions), row.module


@pytest.fixture(scope="module")
def fetched() -> None:
    try:
        sources.prefetch()
        for row in ROWS:
            for release in RELEASES:
                sources.folders(row, release)
    except WheelError as error:
        pytest.skip(f"NVIDIA's headers cannot be had: {error}")


@pytest.mark.usefixtures("fetched")
def test_every_header_of_a_library_is_read_or_left_out_with_a_reason() -> None:
    read = {header for row in ROWS for header in (*row.headers, *row.included)}
    for library in {row.wheel for row in ROWS if row.prefixes and not row.symbols}:
        for folder in sources.include(sources.wheel(library, RELEASES[-1])):
            unread = {file.name for file in folder.glob("*.h")} - read
            assert not [name for name in unread if not any(fnmatch(name, each) for each in HEADERS_LEFT_OUT)]


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        ("cublas", ("CUBLAS_VER_MAJOR", "CUBLAS_VER_MINOR", "CUBLAS_VER_PATCH")),
        ("cudnn", ("CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL")),
        ("cufft", ("CUFFT_VER_MAJOR", "CUFFT_VER_MINOR", "CUFFT_VER_PATCH")),
        ("curand", ("CURAND_VER_MAJOR", "CURAND_VER_MINOR", "CURAND_VER_PATCH")),
        ("cusolverDn", ("CUSOLVER_VER_MAJOR", "CUSOLVER_VER_MINOR", "CUSOLVER_VER_PATCH")),
        ("cusparse", ("CUSPARSE_VER_MAJOR", "CUSPARSE_VER_MINOR", "CUSPARSE_VER_PATCH")),
        ("cusparseLt", ("CUSPARSELT_VER_MAJOR", "CUSPARSELT_VER_MINOR", "CUSPARSELT_VER_PATCH")),
        ("cutensor", ("CUTENSOR_MAJOR", "CUTENSOR_MINOR", "CUTENSOR_PATCH")),
        ("nccl", ("NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH")),
    ],
)
def test_a_librarys_version_is_the_one_in_its_header(module: str, numbers: tuple[str, ...], release: str) -> None:
    row = next(row for row in ROWS if row.module == module)
    constants = sources.header_of(row, release).constants
    assert sources.version(row, release) == ".".join(str(constants[number]) for number in numbers)


@pytest.mark.usefixtures("fetched")
def test_what_is_committed_is_what_the_generator_makes(capsys: pytest.CaptureFixture[str]) -> None:
    # `make check` looks at the libraries of all areas.
    toolkit = [row.module for row in ROWS if getattr(LIBRARIES.get(row.library or row.module), "area", AREA) == AREA]
    assert len(toolkit) > 20
    assert command.main([*toolkit, "--check"]) == 0, capsys.readouterr().out


@pytest.mark.usefixtures("fetched")
def test_a_difference_is_shown_and_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SYS", tmp_path)
    (tmp_path / "cuda_types.py").write_text("old = 1\n")
    assert command.main(["cuda_types", "--check"]) == 1
    assert "-old = 1" in capsys.readouterr().out
    assert command.main(["cuda_types"]) == 0
    assert command.main(["cuda_types", "--check"]) == 0
