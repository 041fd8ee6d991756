"""`python -m cudabind.gen [LIBRARY…] [--check]`: write `cudabind/sys`, or say what would change.

Run by developers after raising a pin, and by CI with --check. It reads NVIDIA's headers from the wheels of the `gen`
extra and the compiler's own headers from gcc; it never touches a module without a row.
"""

from __future__ import annotations

import argparse
import difflib
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from cudabind.gen import layout
from cudabind.gen.emit import EmitError, emit
from cudabind.gen.layout import LayoutError
from cudabind.gen.libraries import ROWS, Row
from cudabind.gen.parse import HeaderError, parse

if TYPE_CHECKING:
    from cudabind.gen.model import Header

SYS = Path(__file__).parent.parent / "sys"


def include_folders(package: str) -> list[Path]:
    """The folders to parse a wheel's headers with: the wheel's own, CUDA's, and the compiler's last.

    Raises:
        HeaderError: the wheel or gcc is not installed.
    """
    wheel = [folder for each in (package, "nvidia-cuda-runtime") for folder in _wheel_include(each)]
    try:
        found = subprocess.run(["gcc", "-print-file-name=include"], capture_output=True, text=True, check=True)
    except OSError as error:
        raise HeaderError("gcc's own headers (stddef.h, stdint.h) are needed to parse NVIDIA's: install gcc") from error
    return [*dict.fromkeys(wheel), Path(found.stdout.strip())]


def _wheel_include(package: str) -> list[Path]:
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError as error:
        raise HeaderError(f"{package} is not installed: pip install cudabind[gen]") from error
    headers = {Path(str(file.locate())) for file in files if file.suffix == ".h"}
    return sorted({parent for file in headers for parent in file.parents if parent.name == "include"})


def header_of(row: Row) -> Header:
    """Parse the headers of a row."""
    return parse(row.headers, include_folders(row.wheel[0]), row.prefixes, row.types)


def generate(row: Row, header: Header) -> str:
    """The text of a row's module.

    Raises:
        LayoutError: ctypes cannot lay a struct out as the compiler does.
        EmitError: the header and the row do not agree.
    """
    rows = {other.module: other for other in ROWS}
    imported = {name: module for module in row.uses for name in header_of(rows[module]).types}
    text = emit(row, header, imported)
    if not row.symbols:
        layout.check(text, header)
    return text


def wrong_wheel(row: Row) -> str:
    """What is wrong with the installed headers, or ``""``: another version makes another module."""
    package, pinned = row.wheel
    installed = metadata.version(package)
    if installed == pinned:
        return ""
    return f"{row.module}: {package} {installed} is installed, but the module is generated from {pinned}"


def differences(row: Row, text: str) -> str:
    """How the module on disk differs from the text, as a unified diff."""
    file = SYS / f"{row.module}.py"
    old = file.read_text().splitlines(keepends=True) if file.exists() else []
    return "".join(difflib.unified_diff(old, text.splitlines(keepends=True), str(file), "generated"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is 1 where --check found a difference or a header could not be read."""
    parser = argparse.ArgumentParser(prog="python -m cudabind.gen", description="Write cudabind/sys from the headers.")
    parser.add_argument("library", nargs="*", help=f"which modules; all by default: {' '.join(r.module for r in ROWS)}")
    parser.add_argument("--check", action="store_true", help="write nothing; show what would change and exit 1")
    options = parser.parse_args(arguments)
    unknown = set(options.library) - {row.module for row in ROWS}
    if unknown:
        parser.error(f"no row in cudabind/gen/libraries.py for {', '.join(sorted(unknown))}")
    failed = False
    for row in ROWS:
        if options.library and row.module not in options.library:
            continue
        failed |= not _run(row, check=options.check)
    return int(failed)


def _run(row: Row, *, check: bool) -> bool:
    try:
        problem = wrong_wheel(row)
        text = generate(row, header_of(row))
    except (HeaderError, LayoutError, EmitError, metadata.PackageNotFoundError) as error:
        sys.stderr.write(f"{row.module}: {error}\n")
        return False
    if problem:
        sys.stderr.write(f"{problem}: pip install cudabind[gen], or raise the pin.\n")
        return False
    changed = differences(row, text)
    if check:
        sys.stdout.write(changed or f"{row.module}: as generated\n")
        return not changed
    (SYS / f"{row.module}.py").write_text(text)
    sys.stdout.write(f"{row.module}: {'written' if changed else 'unchanged'}\n")
    return True


if __name__ == "__main__":
    sys.exit(main())
