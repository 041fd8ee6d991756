"""Draws docs/architecture.svg from the imports of dispatch, all of them: in functions and for types, too.

    python docs/draw.py            draw it
    python docs/draw.py --check    say whether the picture is the one that the imports give

A box is a folder, which imports only from those above it on the page; what goes against the order is red. How many
imports and lines there are is left out, so that the picture changes only where the structure does.
tests/dispatch/test_floors.py reads the same.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dispatch"
PICTURE = Path(__file__).with_name("architecture.svg")
# From the ground up: what stands before is imported by what stands behind. "" is the files of dispatch itself that
# nothing of it is under: keys, refusal, errors, checks, unknown_arguments, logs, progress.
FLOORS = (
    ("", "keys, errors, checks, logs"),
    ("device", "devices, streams, tensors"),
    ("core", "requests, rows, operands"),
    ("execute", "runs plans on streams"),
    ("testing", "checks, guarded memory"),
    ("libraries", "handles, descriptors, kernels"),
    ("ops", "requests, rules, references, plans"),
    ("signal", "functions of several ops"),
    ("parallel", "shards, buckets, rings, stages"),
    ("table", "rows, and the choice of one"),
    ("bind", "request to plan; prepared calls"),
    ("world", "ranks, and their communicators"),
    ("supervise", "workers, queues, futures"),
    ("supervise.process", "workers in child processes"),
    ("cli", "commands, and the package's names"),
    ("torch", "ops with autograd for PyTorch"),
    ("ray", "supervisors and ranks as Ray's actors"),
)
NAMES = tuple(name for name, _ in FLOORS)
TOP = ("__init__", "__main__", "row_check")  # files of dispatch itself that stand on everything


class Import(NamedTuple):
    """One module imported by another, and where."""

    source: str
    target: str
    line: int


def modules() -> dict[str, Path]:
    """The modules of dispatch by their names below it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__") if name != "__init__" else name] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    """Every import of a module of dispatch by another."""
    known, found = modules(), []
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            ours = (target for target in targets if target.split(".")[0] == "dispatch")
            found += [Import(name, _module(target, known), node.lineno) for target in ours]
    return tuple(found)


def _module(target: str, known: dict[str, Path]) -> str:
    """The module that a dotted name is, or is a name of."""
    below = target.removeprefix("dispatch").removeprefix(".")
    if below in known:
        return below
    parent = below.rpartition(".")[0]
    return parent if parent in known else "__init__"


def floor(module: str) -> int:
    """The number of a module's floor."""
    if module in TOP:
        return NAMES.index("cli")
    parts = module.split(".")
    if parts[:2] == ["supervise", "process"]:
        return NAMES.index("supervise.process")
    return NAMES.index(parts[0]) if parts[0] in NAMES else 0


def upward() -> list[Import]:
    """The imports that go against the order of the floors."""
    return [one for one in imports() if floor(one.target) > floor(one.source)]


# -- the picture --------------------------------------------------------------------------------------------------
WIDE, HIGH, GAP, LEFT = 330, 46, 22, 300


def picture() -> str:
    """The SVG."""
    pairs = {(floor(one.source), floor(one.target)) for one in imports()}
    wide, high = LEFT * 2 + WIDE, len(FLOORS) * (HIGH + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        *(_arrow(source, target) for source, target in sorted(pairs) if source != target),
    ]
    for number, (name, what) in enumerate(FLOORS):
        top = GAP + number * (HIGH + GAP)
        title = f"dispatch/{name.replace('.', '/')}" if name else "dispatch/*.py"
        parts += [
            f'<rect x="{LEFT}" y="{top}" width="{WIDE}" height="{HIGH}" rx="6" fill="#eef3fa" stroke="#345"/>',
            f'<text x="{LEFT + 12}" y="{top + 19}" font-size="15" font-weight="bold">{title}</text>',
            f'<text x="{LEFT + 12}" y="{top + 37}" font-size="12" fill="#345">{what}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _arrow(source: int, target: int) -> str:
    """From a floor to the one it imports: on the left, and against the order on the right, in red."""
    y1, y2 = (GAP + number * (HIGH + GAP) + HIGH // 2 for number in (source, target))
    if source > target:
        x, bend, colour = LEFT, LEFT - 24 * (source - target), "#7a93b5"
    else:
        x, bend, colour = LEFT + WIDE, LEFT + WIDE + 24 * (target - source), "#c22"
    return f'<path d="M{x},{y1} C{bend},{y1} {bend},{y2} {x},{y2}" fill="none" stroke="{colour}"/>'


def main() -> int:
    drawn = picture()
    if "--check" in sys.argv[1:]:
        if PICTURE.exists() and PICTURE.read_text() == drawn:
            return 0
        print(f"{PICTURE.relative_to(ROOT)} is not what the imports give: python docs/draw.py draws it")
        return 1
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
