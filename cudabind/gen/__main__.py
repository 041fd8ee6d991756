"""`python -m cudabind.gen [LIBRARY…] [--check | --counts]`: write `cudabind/sys`, or say what would change.

Run by developers after raising a pin, and by CI with --check. NVIDIA's headers come out of the pinned wheels, and the
compiler's own from gcc; no NVIDIA package need be installed. It never touches a module without a row.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cudabind.gen import counts, layout, sources
from cudabind.gen.emit import EmitError, emit
from cudabind.gen.layout import LayoutError
from cudabind.gen.libraries import ROWS
from cudabind.gen.merge import MergeError
from cudabind.gen.parse import HeaderError
from cudabind.gen.wheels import WheelError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    from cudabind.gen.merge import Merged
    from cudabind.gen.row import Row

SYS = Path(__file__).parent.parent / "sys"


def generate(rows: Iterable[Row], merged: dict[str, Merged]) -> dict[str, str]:
    """The texts of modules, by module; a row comes after those it uses.

    Raises:
        LayoutError: ctypes cannot lay a struct out as the compiler does.
        EmitError: the header and the row do not agree.
    """
    texts: dict[str, str] = {}
    modules: dict[str, ModuleType] = {}
    for row in rows:
        imported = {name: module for module in row.uses for name in merged[module].header.types}
        texts[row.module] = text = laid_out(row, merged[row.module], imported, _source(row), modules)
        modules[row.module] = layout.load(row.module, text, uses=modules)
    return texts


def laid_out(
    row: Row, merged: Merged, imported: dict[str, str], source: str, uses: dict[str, ModuleType] | None = None
) -> str:
    """A module's text, in which ctypes lays each struct out as the compiler does.

    Raises:
        LayoutError: ctypes cannot.
        EmitError: the header and the row do not agree.
    """
    placed: set[str] = set()
    while True:
        text = emit(row, merged, imported, source, placed)
        module = layout.load(row.module, text, uses=uses)
        wrong = {} if row.symbols else layout.wrong(module, merged.header, imported)
        if not wrong.keys() - placed:
            break
        placed |= wrong.keys()  # and what has one of these as a member may be the next
    if not row.symbols:
        layout.check(module, merged.header, imported)
    return text


def _source(row: Row) -> str:
    """The wheels that a module comes from, in words: the CUDA 12 package, then the CUDA 13 package's versions."""
    versions: dict[str, list[str]] = {}
    for release in sources.releases(row):
        wheel = sources.wheel(row.wheel, release)
        versions.setdefault(wheel.package, []).append(wheel.version)
    return "; ".join(f"{package} {', '.join(numbers)}" for package, numbers in versions.items())


def differences(module: str, text: str) -> str:
    """How the module on disk differs from the text, as a unified diff."""
    file = SYS / f"{module}.py"
    old = file.read_text().splitlines(keepends=True) if file.exists() else []
    return "".join(difflib.unified_diff(old, text.splitlines(keepends=True), str(file), "generated"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status is 1 where --check found a difference or a header could not be read."""
    parser = argparse.ArgumentParser(prog="python -m cudabind.gen", description="Write cudabind/sys from the headers.")
    parser.add_argument("library", nargs="*", help=f"which modules; all by default: {' '.join(r.module for r in ROWS)}")
    parser.add_argument("--check", action="store_true", help="write nothing; show what would change and exit 1")
    parser.add_argument("--counts", action="store_true", help="print how many functions each module has, and no more")
    options = parser.parse_args(arguments)
    if options.counts:
        sys.stdout.write(f"{counts.table()}\n")
        return 0
    unknown = set(options.library) - {row.module for row in ROWS}
    if unknown:
        parser.error(f"no row in cudabind/gen/libraries.py for {', '.join(sorted(unknown))}")
    try:
        rows = _with_uses(options.library or [row.module for row in ROWS])
        texts = generate(rows, sources.merged(rows))
    except (EmitError, HeaderError, LayoutError, MergeError, WheelError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    wanted = {module: text for module, text in texts.items() if module in (options.library or texts)}
    same = [_check(module, text) if options.check else _write(module, text) for module, text in wanted.items()]
    return int(options.check and not all(same))


def _with_uses(modules: Iterable[str]) -> tuple[Row, ...]:
    """The rows of modules and of all that these use, in the order of ROWS."""
    wanted = set(modules)
    for row in reversed(ROWS):  # a row uses only those before it
        wanted.update(row.uses if row.module in wanted else ())
    return tuple(row for row in ROWS if row.module in wanted)


def _check(module: str, text: str) -> bool:
    changed = differences(module, text)
    sys.stdout.write(changed or f"{module}: as generated\n")
    return not changed


def _write(module: str, text: str) -> bool:
    changed = differences(module, text)
    (SYS / f"{module}.py").write_text(text)
    sys.stdout.write(f"{module}: {'written' if changed else 'unchanged'}\n")
    return not changed


if __name__ == "__main__":
    sys.exit(main())
