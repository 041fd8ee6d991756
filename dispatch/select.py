"""Choosing a row: `select(request, arch)` gives the first that takes it, or raises NoRow with a reason for each.

plans.py asks for candidates, users ask `explain`. Pure: it looks at the table and the request, and calls no library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dispatch.errors import NoRow
from dispatch.keys import Arch
from dispatch.request import Request
from dispatch.row import Row, takes
from dispatch.table import TABLE

__all__ = ["Explanation", "candidates", "explain", "nearest", "select"]

Versions = Mapping[str, tuple[int, ...]]
ANY_VERSION: Versions = {}


def candidates(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Iterator[tuple[Row, list[str]]]:
    """Every row of the request's op in order, and why it refuses: no reason means that it takes the request.

    `versions` are those of the libraries at hand; a library that is not named there is taken to be new enough.
    """
    for row in TABLE.of(request.op):
        yield row, _machine(row, arch, versions) or takes(row, request)


def _machine(row: Row, arch: Arch, versions: Versions) -> list[str]:
    if not row.on(arch):
        span = str(row.arch) if row.until == row.arch else f"{row.arch} or newer" if row.until is None else f"{row.arch} to {row.until}"
        return [f"needs {span}, has {arch}"]
    version = versions.get(row.library)
    if version is not None and version < row.since:
        wanted, found = (".".join(map(str, v)) for v in (row.since, version))
        return [f"needs {row.library} {wanted}, has {found}"]
    return []


def select(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Row:
    """The first row that takes the request on an architecture; NoRow lists every row tried and the nearest request."""
    refusals = []
    for row, reasons in candidates(request, arch, versions):
        if not reasons:
            return row
        refusals.append((row.name, reasons))
    raise NoRow(request.describe(), refusals, nearest(request, arch, versions))


def nearest(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> str:
    """The smallest change that makes a request one that a row of this architecture takes, in words."""
    best: tuple[int, str] | None = None
    for row, reasons in candidates(request, arch, versions):
        if reasons and row.on(arch):
            weight = sum(_weight(reason) for reason in reasons)
            if best is None or weight < best[0]:
                best = weight, f"{row.name}, which {' and '.join(reasons)}"
    return best[1] if best else f"no row of op {request.op!r} is for {arch}"


def _weight(reason: str) -> int:
    """How far a change goes: an order or an alignment is a copy, another choice is another result, a dtype the most."""
    if reason.startswith("needs dtypes"):
        wanted, _, given = reason.removeprefix("needs dtypes (").partition("), has (")
        pairs = zip(wanted.split(", "), given.rstrip(")").split(", "), strict=True)
        return 2 + 2 * sum(one != other for one, other in pairs)
    return 3 if "epilogue of" in reason or "compute" in reason or "scale modes" in reason else 1


@dataclass(frozen=True)
class Explanation:
    """Which row carries a request out, and why those before it do not."""

    request: str
    row: Row
    refusals: tuple[tuple[str, tuple[str, ...]], ...]

    def __str__(self) -> str:
        row = self.row
        since = ".".join(map(str, row.since))
        run_on = ", ".join(row.run_on) or "no machine yet"
        lines = [
            self.request,
            f"-> {row.name}",
            f"   calls cudabind.sys.{row.library}.{row.function}" if row.since else f"   calls {row.library}.{row.function}",
            *([f"   needs {row.library} {since} or newer"] if since else []),
            f"   has run on {run_on}",
        ]
        return "\n".join(lines)


def explain(request: Request, arch: Arch | None = None, versions: Versions = ANY_VERSION) -> Explanation:
    """Say which row carries a request out on an architecture (that of its device), and what refused it before."""
    chosen: Any = None
    refusals = []
    where = request.device.arch if arch is None else arch
    for row, reasons in candidates(request, where, versions):
        if not reasons:
            chosen = row
            break
        if row.on(where):
            refusals.append((row.name, tuple(reasons)))
    if chosen is None:
        chosen = select(request, where, versions)  # raises, with all the reasons
    return Explanation(request.describe(), chosen, tuple(refusals))
