"""Add a library: nvJPEG, from the headers on the package index to a call, in a temporary folder.

A library is one row in each of three tables: WHEELS of cudabind/gen/pins.py and ROWS of cudabind/gen/libraries.py
(its headers, and their peculiarities), and LIBRARIES of cudabind/__init__.py (how the file is found). In the
repository, write them there and run `python -m cudabind.gen nvjpeg`. Here they are added at run time, and all files
are deleted at the end.

Needs libclang and gcc (`pip install 'cudabind[gen]'`), and the network for the headers and for nvJPEG itself (4 MB).

    python examples/06_add_a_library.py
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cudabind import LIBRARIES, Library
from cudabind.__main__ import describe
from cudabind.errors import CudaError
from cudabind.gen import __main__ as command
from cudabind.gen import sources
from cudabind.gen.libraries import ROWS, Row
from cudabind.gen.pins import WHEELS, Pins

if TYPE_CHECKING:
    from types import ModuleType

# The library, its packages for CUDA 12 and 13, and its versions in CUDA 12.9, 13.0, 13.1 and 13.5.
PINS = Pins("nvjpeg", "nvidia-nvjpeg-cu12", "nvidia-nvjpeg", ("12.4.0.76", "13.0.1.86", "13.0.2.28", "13.3.2.43"))
ROW = Row(
    module="nvjpeg",
    headers=("nvjpeg.h",),
    wheel="nvjpeg",
    docs="https://docs.nvidia.com/cuda/nvjpeg/",
    prefixes=("nvjpeg",),
    status="nvjpegStatus_t",
    success="NVJPEG_STATUS_SUCCESS",
    error="CudaError",  # in the repository: its own class in cudabind/errors.py
    uses=("cuda_types",),
)
LIBRARY = Library(
    "nvjpeg", "nvjpeg", "libnvjpeg.so.13 libnvjpeg.so.12", "nvjpegGetProperty", "property", "pip install nvidia-nvjpeg"
)

# Here and not in a function, because the headers are read in processes that may import this file first.
sources.WHEELS = (*WHEELS, PINS)
LIBRARIES[LIBRARY.name] = LIBRARY


def generated(folder: Path) -> ModuleType:
    """The module, generated from the headers of four releases, like `from cudabind.sys import nvjpeg`."""
    rows = (*(row for row in ROWS if row.module in ROW.uses), ROW)
    text = command.generate(rows, sources.merged(rows))["nvjpeg"]
    (folder / "nvjpeg.py").write_text(text, encoding="utf-8")
    print(f"generated {len(text.splitlines())} lines from nvjpeg.h of {', '.join(PINS.versions)}")
    sys.path.insert(0, str(folder))
    return importlib.import_module("nvjpeg")


def installed(folder: Path) -> str:
    """Install nvJPEG's wheel into the folder and set the loader's override; returns the wheel's version.

    If nvJPEG is installed, in the environment or with a toolkit, the loader finds it without an override.
    """
    pin = f"{PINS.cu13}=={PINS.versions[-1]}"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder / "site"), pin], check=True)
    (file,) = (folder / "site").rglob("libnvjpeg.so.13")
    os.environ["CUDABIND_NVJPEG_PATH"] = str(file)
    print(f"installed {pin}: {file.name}")
    return PINS.versions[-1]


def called(nvjpeg: Any) -> list[int]:
    """The library's version by its own function, and the error of a call with a wrong argument."""
    version = [ctypes.c_int() for _ in range(3)]
    for part, value in zip(("MAJOR_VERSION", "MINOR_VERSION", "PATCH_LEVEL"), version, strict=True):
        nvjpeg.nvjpegGetProperty(nvjpeg.libraryPropertyType[part], ctypes.byref(value))
    try:
        nvjpeg.nvjpegGetProperty(-1, ctypes.byref(ctypes.c_int()))
    except CudaError as error:
        print(f"a call that fails raises: {error}")
    return [value.value for value in version]


def main() -> int:
    """Generate, install, call; 1 if the library is not the one that was installed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="host", help="taken as by the other examples; nothing here needs one")
    parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nvjpeg = generated(folder)
        wanted = [int(number) for number in installed(folder).split(".")[:3]]
        told = called(nvjpeg)
        found = describe(LIBRARY)  # a line of `python -m cudabind list --json`
    print(f"{found['functions']} functions, of which {found['version']} lacks: {', '.join(found['missing']) or 'none'}")
    right = told == wanted
    print(f"nvjpegGetProperty says {told}: {'no error' if right else f'an error, {wanted} was installed'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
