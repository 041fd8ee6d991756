"""The generated modules against a C compiler: what gcc says of a header, ctypes and the enums must say too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from enum import IntEnum
from typing import TYPE_CHECKING

import pytest

from cudabind.sys import cublasLt, cuda_types

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytest.importorskip("clang", reason="the headers' folders are found by cudabind.gen, which needs libclang")

from cudabind.gen.__main__ import include_folders
from cudabind.gen.libraries import ROWS
from cudabind.gen.parse import HeaderError

MODULES = {"cublasLt": cublasLt, "cuda_types": cuda_types}


def structs(module: ModuleType) -> list[type[ctypes.Structure]]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, ctypes.Structure)]
    return list(dict.fromkeys(kind for kind in kinds if kind.__module__ == module.__name__))


def enums(module: ModuleType) -> list[type[IntEnum]]:
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, IntEnum)]
    return list(dict.fromkeys(kind for kind in kinds if kind.__module__ == module.__name__))


def constants(module: ModuleType) -> dict[str, int]:
    return {name: value for name, value in vars(module).items() if type(value) is int}


def expected(module: ModuleType) -> dict[str, int]:
    """What Python says, by the C expression that must have the same value."""
    said = constants(module)
    for struct in structs(module):
        said[f"sizeof({struct.__name__})"] = ctypes.sizeof(struct)
        for name, *_ in struct._fields_:
            said[f"offsetof({struct.__name__}, {name})"] = getattr(struct, name).offset
    for enum in enums(module):
        said |= {name: member.value for name, member in enum.__members__.items()}
    return said


def ask_gcc(headers: tuple[str, ...], folders: list[Path], expressions: list[str], where: Path) -> dict[str, int]:
    includes = "".join(f"#include <{header}>\n" for header in headers)
    prints = "".join(f'  printf("%lld\\n", (long long)({expression}));\n' for expression in expressions)
    source = where / "ask.c"
    source.write_text(
        f"{includes}#include <stddef.h>\n#include <stdio.h>\nint main(void) {{\n{prints}  return 0;\n}}\n"
    )
    program = where / "ask"
    subprocess.run(["gcc", "-o", program, source, *(f"-I{folder}" for folder in folders)], check=True)
    answers = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(expressions, map(int, answers), strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_sizes_offsets_and_values_are_the_compilers(name: str, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    row = next(row for row in ROWS if row.module == name)
    try:
        folders = include_folders(row.wheel[0])[:-1]
    except HeaderError as error:
        pytest.skip(str(error))
    said = expected(MODULES[name])
    assert ask_gcc(row.headers, folders, list(said), tmp_path) == said


def test_the_structs_that_calls_pass_by_value_or_in_arrays_have_their_documented_size() -> None:
    assert ctypes.sizeof(cublasLt.cublasLtMatmulAlgo_t) == 64
    assert ctypes.sizeof(cublasLt.cublasLtMatmulHeuristicResult_t) == 96
    assert ctypes.sizeof(cuda_types.cuDoubleComplex) == 16
