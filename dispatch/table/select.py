"""Choosing a row: `select(request, arch)` gives the first that takes it, or raises NoRow with a reason for each.

`bind` asks for candidates, users ask `explain`. Pure: it looks at the table and the request, and calls no library.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from dispatch.checks import check_type, shown
from dispatch.core.request import check_request
from dispatch.core.row import Row, accepts, refusals
from dispatch.errors import BadRequest, NoRow, Refused
from dispatch.execute.installed import ANY_VERSION, Versions
from dispatch.refusal import Kind, Refusal, distance
from dispatch.table.table import TABLE

if TYPE_CHECKING:
    from dispatch.core.request import Request
    from dispatch.keys import Arch

__all__ = ["Explanation", "candidates", "explain", "no_row", "reasons", "select"]


def candidates(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Iterator[Row]:
    """The rows that take a request on an architecture, in order; the first carries it out.

    `versions` are those of the libraries at hand; a library that is not named there is taken to be new enough.
    """
    wanted = request.signature()
    for row in TABLE.with_dtypes(request.op, wanted.dtypes):
        if not _machine(row, arch, versions) and accepts(row, request, wanted):
            yield row


def reasons(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> list[tuple[Row, list[Refusal]]]:
    """Every row of the request's op in order, and why it refuses; no reason where it takes the request."""
    wanted = request.signature()
    return [(row, _machine(row, arch, versions) or refusals(row, request, wanted)) for row in TABLE.of(request.op)]


def _machine(row: Row, arch: Arch, versions: Versions) -> list[Refusal]:
    if not row.on(arch):
        return [Refusal(Kind.ARCH, (row.min_arch, row.max_arch), arch)]
    version = versions.get(row.library) if row.min_version else None
    if version is not None and version < row.min_version:
        return [Refusal(Kind.VERSION, (row.library, row.min_version), version)]
    return []


def select(request: Request, arch: Arch, versions: Versions = ANY_VERSION) -> Row:
    """The first row that takes the request on an architecture; NoRow lists every row tried and the nearest request."""
    for row in candidates(request, arch, versions):
        return row
    raise no_row(request, arch, versions)


def no_row(
    request: Request,
    arch: Arch,
    versions: Versions = ANY_VERSION,
    refused: Mapping[Row, Refused] = MappingProxyType({}),
) -> NoRow:
    """The error for a request that no row takes; `refused` holds what libraries said to rows that did."""
    tried = reasons(request, arch, versions)
    for place, (row, _) in enumerate(tried):
        if row in refused:
            tried[place] = row, [Refusal(refused[row].kind, str(refused[row]))]
    change = nearest(tried, arch)
    if refused and request.advice:  # a library said no to what its rows take
        change = f"{next(iter(refused)).name} with {request.advice}"
    return NoRow(request.describe(), [(row.name, why) for row, why in tried], change)


def nearest(tried: Sequence[tuple[Row, Sequence[Refusal]]], arch: Arch) -> str:
    """The smallest change that makes a request one that a row of this architecture takes, in words."""
    here = [(row, why) for row, why in tried if row.on(arch) and why]
    if not here:
        return f"no row is for {arch}"
    row, why = min(here, key=lambda entry: distance(entry[1]))
    return f"{row.name}, which {' and '.join(map(str, why))}"


@dataclass(frozen=True)
class Explanation:
    """Which row carries a request out, and why those before it do not.

    `launch` says how its plan on the current stream is launched, where it has run there: as one graph at any addresses,
    or by its library, and why.
    """

    request: str
    row: Row
    refusals: tuple[tuple[str, tuple[Refusal, ...]], ...]
    launch: str = ""

    def __str__(self) -> str:
        row = self.row
        since = ".".join(map(str, row.min_version))
        run_on = ", ".join(row.run_on) or "no machine yet"
        lines = [
            self.request,
            f"-> {row.name}",
            f"   calls cudabind.sys.{row.library}.{row.function}"
            if row.min_version
            else f"   calls {row.library}.{row.function}",
            *([f"   needs {row.library} {since} or newer"] if since else []),
            f"   has run on {run_on}",
            *([f"   NaN and infinities: {row.nonfinite}"] if row.nonfinite else []),
            *([f"   {self.launch}"] if self.launch else []),
        ]
        return "\n".join(lines)


def explain(request: Request, arch: Arch | None = None, versions: Versions = ANY_VERSION) -> Explanation:
    """Say which row carries a request out on an architecture (that of its device), and what refused it before."""
    check_request(request)
    if arch is not None and not isinstance(arch, int):
        raise BadRequest("arch", shown(arch), "an Arch, such as dispatch.Arch.of('sm_90')")
    check_type("versions", versions, Mapping)
    where = request.device.arch if arch is None else arch
    chosen = select(request, where, versions)
    before = itertools.takewhile(lambda entry: entry[0] is not chosen, reasons(request, where, versions))
    refused = tuple((row.name, tuple(why)) for row, why in before if row.on(where))
    launch = _launch(request) if where == request.device.arch else ""
    return Explanation(request.describe(), chosen, refused, launch)


def _launch(request: Request) -> str:
    """How the plan that a request has on the current stream is launched; "" where it has none there."""
    plan = request.device.executor().plans.get((type(request), *request.key()))
    if plan is None or plan.relocation is None:
        return ""
    why, nodes = plan.relocation.why, plan.relocation.nodes
    if why:
        return f"launched by its library: {why}"
    return f"launched as a graph of {nodes} node{'s' if nodes > 1 else ''}, at any addresses"
