"""The generated modules against a C compiler: what gcc says of a header, ctypes and the enums must say too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from cudabind.sys import cublasLt, cuda_types

pytest.importorskip("clang", reason="the headers' folders are found by cudabind.gen, which needs libclang")

from cudabind.gen import layout, sources
from cudabind.gen.__main__ import SYS
from cudabind.gen.libraries import RELEASES, ROWS, Row
from cudabind.gen.model import Enum, Header, Record
from cudabind.gen.parse import including
from cudabind.gen.wheels import WheelError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

# Shared types, and the libraries whose structs are not the same in all versions.
MODULES = ("cuda_types", "cublasLt", "cusparseLt", "nccl")


def own(module: ModuleType, name: str) -> bool:
    return getattr(getattr(module, name, None), "__module__", "") == module.__name__


def said(module: ModuleType, header: Header) -> dict[str, int]:
    """What Python says, by the C expression that must have the same value."""
    found = {name: getattr(module, name) for name, value in header.constants.items() if isinstance(value, int)}
    for name, declared in header.types.items():
        if isinstance(declared, Record) and declared.c_name and own(module, name):
            struct = getattr(module, name)
            c_name = declared.c_name
            found[f"sizeof({c_name})"] = ctypes.sizeof(struct)
            found |= {f"offsetof({c_name}, {field})": getattr(struct, field).offset for field, *_ in struct._fields_}
        elif isinstance(declared, Enum) and own(module, name):
            found |= {member: getattr(module, name)[member].value for member, _ in declared.members}
    return found


def ask_gcc(row: Row, release: str, expressions: list[str], where: Path) -> dict[str, int]:
    prints = "".join(f'  printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
    source = where / "ask.c"
    headers = including((*sources.headers(row, release), "stddef.h", "stdio.h"))
    source.write_text(f"{headers}int main(void) {{\n{prints}  return 0;\n}}\n")
    program = where / "ask"
    folders = [f"-I{folder}" for folder in sources.folders(row, release)[:-1]]
    subprocess.run(["gcc", "-o", program, source, *folders], check=True)
    answers = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(expressions, map(int, answers), strict=True))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", MODULES)
def test_sizes_offsets_and_values_are_the_compilers_in_every_release(name: str, release: str, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    row = next(row for row in ROWS if row.module == name)
    try:
        header = sources.header_of(row, release)
    except WheelError as error:
        pytest.skip(f"NVIDIA's headers cannot be had: {error}")
    module = layout.load(name, (SYS / f"{name}.py").read_text(), sources.version(row, release))
    expected = said(module, header)
    assert ask_gcc(row, release, list(expected), tmp_path) == expected
    assert len(expected) > 20


def test_the_structs_that_calls_pass_by_value_or_in_arrays_have_their_documented_size() -> None:
    assert ctypes.sizeof(cublasLt.cublasLtMatmulAlgo_t) == 64
    assert ctypes.sizeof(cublasLt.cublasLtMatmulHeuristicResult_t) == 96
    assert ctypes.sizeof(cuda_types.cuDoubleComplex) == 16
