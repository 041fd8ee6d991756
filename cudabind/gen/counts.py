"""How many functions each module binds, by CUDA release, as the Markdown table that docs/libraries.md has.

`python -m cudabind.gen --counts` prints it and a test compares the page with it. It reads the generated modules and the
pinned versions: no header is parsed and no library is opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from cudabind import LIBRARIES, _bind
from cudabind._lazy import key
from cudabind.gen import sources
from cudabind.gen.libraries import ROWS

if TYPE_CHECKING:
    from types import ModuleType

SHOWN = ("12.9", "13.0", "13.5")


def functions(module: ModuleType, version: str) -> int:
    """The functions of a generated module that the headers of a version declare, the inline ones among them."""
    since: dict[str, str] = module.SINCE
    until: dict[str, str] = module.UNTIL
    own = _bind.functions(module)
    return sum(key(since.get(n, "0")) <= key(version) <= key(until.get(n, "9999")) for n in own)


def table() -> str:
    """The table, a row for each module that has functions, by area."""
    lines = [f"| module | {' | '.join(f'CUDA {release}' for release in SHOWN)} |", "|---|" + "---|" * len(SHOWN)]
    area = ""
    for row in ROWS:
        if row.symbols or not row.prefixes:
            continue
        own = LIBRARIES[row.library or row.module].area
        if own != area:
            area = own
            lines.append(f"| **{area}** |{' |' * len(SHOWN)}")
        module = importlib.import_module(f"cudabind.sys.{row.module}")
        counts = [functions(module, sources.version(row, release)) for release in SHOWN]
        lines.append(f"| `{row.module}` | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)
